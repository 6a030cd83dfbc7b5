// SPDX-License-Identifier: Apache-2.0
#include "tokenizer/chat_template/parser.h"

#include <fmt/format.h>

#include <algorithm>

namespace fovea::jinja {

Parser::Level::Level(Parser& parser) : depth(parser.depth_) {
  if (depth >= kMaxDepth) parser.fail(fmt::format("nested deeper than {}", kMaxDepth));
  ++depth;
}

bool Parser::skip_sign(std::string_view sign) {
  if (!is_sign(sign)) return false;
  take();
  return true;
}

bool Parser::skip_name(std::string_view name) {
  if (!is_name(name)) return false;
  take();
  return true;
}

void Parser::expect_sign(std::string_view sign) {
  if (!skip_sign(sign)) fail_here(fmt::format("'{}'", sign));
}

void Parser::expect_name(std::string_view name) {
  if (!skip_name(name)) fail_here(fmt::format("'{}'", name));
}

std::string Parser::take_name() {
  if (now().kind != TokenKind::name) fail_here("a name");
  return take().text;
}

void Parser::expect(TokenKind kind, std::string_view shown) {
  if (now().kind != kind) fail_here(shown);
  take();
}

void Parser::fail(std::string message) const {
  throw SyntaxProblem{now().line, std::move(message)};
}

void Parser::fail_here(std::string_view wanted) const {
  const bool is_end = now().kind == TokenKind::end || now().text.empty();
  fail(fmt::format("{} is missing {}", wanted,
                   is_end ? "at the end" : fmt::format("before '{}'", now().text.substr(0, 40))));
}

Block Parser::parse() {
  Block block = block_until({});
  if (now().kind != TokenKind::end) fail(fmt::format("unexpected '{}'", ahead().text));
  return block;
}

Block Parser::block_until(std::initializer_list<std::string_view> ends) {
  const Level level(*this);
  Block block;
  while (now().kind != TokenKind::end) {
    if (now().kind == TokenKind::data) {
      block.push_back({.kind = StatementKind::text, .line = now().line, .text = now().text});
      take();
    } else if (now().kind == TokenKind::variable_begin) {
      const int line = take().line;
      Statement output{.kind = StatementKind::output, .line = line};
      output.value.push_back(tuple_or_expression(true));
      expect(TokenKind::variable_end, "'}}'");
      block.push_back(std::move(output));
    } else {
      if (ahead().kind == TokenKind::name && std::ranges::find(ends, ahead().text) != ends.end()) {
        take();
        return block;
      }
      take();
      statement(block);
    }
  }
  if (ends.size() > 0) fail_here(fmt::format("'{}'", *(ends.end() - 1)));
  return block;
}

Block Parser::body_until(std::string_view end) {
  expect(TokenKind::block_end, "'%}'");
  Block block = block_until({end});
  expect_name(end);
  return block;
}

void Parser::statement(Block& block) {
  const int line = now().line;
  const std::string name = take_name();
  if (name == "if") {
    block.push_back(if_statement(line));
  } else if (name == "for") {
    block.push_back(for_statement(line));
  } else if (name == "set") {
    block.push_back(set_statement(line));
  } else if (name == "macro") {
    block.push_back(macro_statement(line));
  } else if (name == "call") {
    block.push_back(call_statement(line));
  } else if (name == "filter") {
    block.push_back(filter_statement(line));
  } else if (name == "with") {
    block.push_back(with_statement(line));
  } else if (name == "generation") {
    Statement scope{.kind = StatementKind::scope, .line = line};
    scope.body = body_until("endgeneration");
    block.push_back(std::move(scope));
  } else if (name == "break" || name == "continue") {
    if (loops_ == 0) fail(fmt::format("'{}' is not in a loop", name));
    block.push_back(
        {.kind = name == "break" ? StatementKind::leave : StatementKind::go_on, .line = line});
  } else if (name == "print") {
    Statement output{.kind = StatementKind::output, .line = line};
    output.value.push_back(tuple_or_expression(true));
    block.push_back(std::move(output));
  } else {
    throw SyntaxProblem{line, fmt::format("unexpected '{}'", name)};
  }
  expect(TokenKind::block_end, "'%}'");
}

Statement Parser::if_statement(int line) {
  Statement result{.kind = StatementKind::if_else, .line = line};
  std::string word = "if";
  while (word != "endif") {
    Branch branch;
    if (word != "else") branch.condition.push_back(tuple_or_expression(false));
    expect(TokenKind::block_end, "'%}'");
    branch.body = word == "else" ? block_until({"endif"}) : block_until({"elif", "else", "endif"});
    result.branches.push_back(std::move(branch));
    word = take_name();
  }
  return result;
}

Statement Parser::for_statement(int line) {
  Statement loop{.kind = StatementKind::for_loop, .line = line};
  loop.target = target(false);
  expect_name("in");
  loop.value.push_back(tuple_or_expression(false));
  if (skip_name("if")) loop.condition.push_back(expression());
  if (is_name("recursive")) fail("recursive loops are not supported");
  expect(TokenKind::block_end, "'%}'");
  ++loops_;
  loop.body = block_until({"else", "endfor"});
  --loops_;
  if (take_name() == "else") loop.otherwise = body_until("endfor");
  return loop;
}

Statement Parser::set_statement(int line) {
  Statement set{.kind = StatementKind::assign, .line = line};
  set.target = target(true);
  if (skip_sign("=")) {
    set.value.push_back(tuple_or_expression(true));
    return set;
  }
  set.kind = StatementKind::set_block;
  if (is_sign("|")) set.value.push_back(filters(Expr{.line = line}));
  set.body = body_until("endset");
  return set;
}

Statement Parser::macro_statement(int line) {
  Statement macro{.kind = StatementKind::macro, .line = line};
  macro.text = take_name();
  macro.parameters = parameters();
  const int loops = std::exchange(loops_, 0);
  macro.body = body_until("endmacro");
  loops_ = loops;
  return macro;
}

Statement Parser::call_statement(int line) {
  Statement call{.kind = StatementKind::call, .line = line};
  if (is_sign("(")) call.parameters = parameters();
  call.value.push_back(expression());
  if (call.value[0].kind != ExprKind::call) fail("'call' needs a call");
  const int loops = std::exchange(loops_, 0);
  call.body = body_until("endcall");
  loops_ = loops;
  return call;
}

Statement Parser::filter_statement(int line) {
  Statement result{.kind = StatementKind::filtered, .line = line};
  result.value.push_back(filters(filter(Expr{.line = line})));
  result.body = body_until("endfilter");
  return result;
}

Statement Parser::with_statement(int line) {
  Statement with{.kind = StatementKind::scope, .line = line};
  while (now().kind != TokenKind::block_end) {
    if (!with.assignments.empty()) expect_sign(",");
    Target name = single_target(false);
    expect_sign("=");
    with.assignments.emplace_back(std::move(name), expression());
  }
  with.body = body_until("endwith");
  return with;
}

std::vector<Parameter> Parser::parameters() {
  std::vector<Parameter> list;
  expect_sign("(");
  while (!is_sign(")")) {
    if (!list.empty()) expect_sign(",");
    Parameter parameter{take_name()};
    if (skip_sign("=")) parameter.fallback.push_back(expression());
    if (parameter.fallback.empty() && !list.empty() && !list.back().fallback.empty())
      fail(fmt::format("'{}' needs a default as the parameter before it", parameter.name));
    list.push_back(std::move(parameter));
  }
  expect_sign(")");
  return list;
}

Target Parser::target(bool with_attribute) {
  Target first = single_target(with_attribute);
  if (!is_sign(",")) return first;
  Target all;
  all.parts.push_back(std::move(first));
  while (skip_sign(",") && (is_sign("(") || (now().kind == TokenKind::name && !is_name("in"))))
    all.parts.push_back(single_target(with_attribute));
  return all;
}

Target Parser::single_target(bool with_attribute) {
  if (skip_sign("(")) {
    const Level level(*this);
    Target inner = target(with_attribute);
    expect_sign(")");
    return inner;
  }
  Target single{take_name()};
  constexpr std::string_view kReserved[] = {"true", "false", "none", "True", "False", "None"};
  if (std::ranges::find(kReserved, single.name) != std::end(kReserved))
    fail(fmt::format("'{}' cannot be assigned", single.name));
  if (with_attribute && skip_sign(".")) single.attribute = take_name();
  return single;
}

}  // namespace fovea::jinja
