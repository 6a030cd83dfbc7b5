// SPDX-License-Identifier: Apache-2.0
// Parses the tokens of a template: statements in parser.cc, expressions in parse_expression.cc.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "tokenizer/chat_template/lexer.h"
#include "tokenizer/chat_template/syntax.h"

namespace fovea::jinja {

class Parser {
 public:
  static constexpr int kMaxDepth = 100;  // levels of statements, and of expressions

  explicit Parser(std::vector<Token> tokens) : tokens_(std::move(tokens)) {}
  Block parse();  // throws SyntaxProblem

 private:
  // Counts levels of nesting while it lives.
  struct Level {
    explicit Level(Parser& parser);
    ~Level() { --depth; }
    int& depth;
  };

  const Token& now() const { return tokens_[at_]; }
  const Token& ahead() const { return tokens_[std::min(at_ + 1, tokens_.size() - 1)]; }
  Token take() { return tokens_[at_ + 1 < tokens_.size() ? at_++ : at_]; }
  bool is_sign(std::string_view sign) const { return is(TokenKind::sign, sign); }
  bool is_name(std::string_view name) const { return is(TokenKind::name, name); }
  bool is(TokenKind kind, std::string_view text) const {
    return now().kind == kind && now().text == text;
  }
  bool skip_sign(std::string_view sign);
  bool skip_name(std::string_view name);
  void expect_sign(std::string_view sign);
  void expect_name(std::string_view name);
  std::string take_name();
  void expect(TokenKind kind, std::string_view shown);
  [[noreturn]] void fail(std::string message) const;
  [[noreturn]] void fail_here(std::string_view wanted) const;

  // Reads statements up to a block that begins with one of the names, which is not read.
  Block block_until(std::initializer_list<std::string_view> ends);
  Block body_until(std::string_view end);  // reads "end" and the end of its mark, too
  void statement(Block& block);
  Statement if_statement(int line);
  Statement for_statement(int line);
  Statement set_statement(int line);
  Statement macro_statement(int line);
  Statement call_statement(int line);
  Statement filter_statement(int line);
  Statement with_statement(int line);
  std::vector<Parameter> parameters();
  Target target(bool with_attribute);
  Target single_target(bool with_attribute);

  Expr make(ExprKind kind, std::vector<Expr> parts, std::string text = {});
  Expr tuple_or_expression(bool with_conditional);
  Expr expression();
  Expr or_expression();
  Expr and_expression();
  Expr not_expression();
  Expr comparison();
  Expr sum();
  Expr concatenation();
  Expr product();
  Expr power();
  Expr unary(bool with_filter);
  Expr primary();
  Expr postfix(Expr object);
  Expr filters(Expr subject);
  Expr filter(Expr subject);
  Expr test(Expr subject);
  Expr subscript(Expr object);
  Expr bracketed(std::string_view end);
  Expr dict();
  void arguments(Expr& call);

  std::vector<Token> tokens_;
  size_t at_ = 0;
  int depth_ = 0;
  int loops_ = 0;  // loops around the current statement
};

}  // namespace fovea::jinja
