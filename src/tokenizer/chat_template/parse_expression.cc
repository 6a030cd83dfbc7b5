// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <charconv>

#include "tokenizer/chat_template/builtins.h"
#include "tokenizer/chat_template/parser.h"

namespace fovea::jinja {
namespace {

// An initializer list would copy the expressions.
std::vector<Expr> one(Expr part) {
  std::vector<Expr> parts;
  parts.push_back(std::move(part));
  return parts;
}

std::vector<Expr> both(Expr left, Expr right) {
  std::vector<Expr> parts = one(std::move(left));
  parts.push_back(std::move(right));
  return parts;
}

constexpr std::string_view kComparisons[] = {"==", "!=", "<", "<=", ">", ">="};

}  // namespace

Expr Parser::make(ExprKind kind, std::vector<Expr> parts, std::string text) {
  Expr made{.kind = kind, .line = parts.empty() ? now().line : parts[0].line};
  for (const Expr& part : parts) made.depth = std::max(made.depth, part.depth + 1);
  if (made.depth > kMaxDepth) fail(fmt::format("expressions nested deeper than {}", kMaxDepth));
  made.parts = std::move(parts);
  made.text = std::move(text);
  return made;
}

Expr Parser::tuple_or_expression(bool with_conditional) {
  const auto next = [&] { return with_conditional ? expression() : or_expression(); };
  const int line = now().line;
  Expr first = next();
  if (!is_sign(",")) return first;
  std::vector<Expr> parts;
  parts.push_back(std::move(first));
  while (skip_sign(",")) {
    if (now().kind == TokenKind::variable_end || now().kind == TokenKind::block_end || is_sign(")"))
      break;
    parts.push_back(next());
  }
  Expr tuple = make(ExprKind::tuple, std::move(parts));
  tuple.line = line;
  return tuple;
}

Expr Parser::expression() {
  const Level level(*this);
  Expr value = or_expression();
  while (skip_name("if")) {
    std::vector<Expr> parts;
    parts.push_back(or_expression());
    parts.push_back(std::move(value));
    if (skip_name("else")) parts.push_back(expression());
    value = make(ExprKind::conditional, std::move(parts));
  }
  return value;
}

Expr Parser::or_expression() {
  Expr left = and_expression();
  while (skip_name("or")) left = make(ExprKind::logic_or, both(std::move(left), and_expression()));
  return left;
}

Expr Parser::and_expression() {
  Expr left = not_expression();
  while (skip_name("and"))
    left = make(ExprKind::logic_and, both(std::move(left), not_expression()));
  return left;
}

Expr Parser::not_expression() {
  if (!skip_name("not")) return comparison();
  const Level level(*this);
  return make(ExprKind::unary, one(not_expression()), "not");
}

Expr Parser::comparison() {
  std::vector<Expr> operands;
  std::vector<std::string> signs;
  operands.push_back(sum());
  while (true) {
    if (now().kind == TokenKind::sign &&
        std::ranges::find(kComparisons, now().text) != std::end(kComparisons)) {
      signs.push_back(take().text);
    } else if (skip_name("in")) {
      signs.emplace_back("in");
    } else if (is_name("not") && ahead().kind == TokenKind::name && ahead().text == "in") {
      take();
      take();
      signs.emplace_back("not in");
    } else {
      break;
    }
    operands.push_back(sum());
  }
  if (signs.empty()) return std::move(operands[0]);
  Expr chain = make(ExprKind::comparison, std::move(operands));
  chain.signs = std::move(signs);
  return chain;
}

Expr Parser::sum() {
  Expr left = concatenation();
  while (is_sign("+") || is_sign("-")) {
    std::string sign = take().text;
    left = make(ExprKind::binary, both(std::move(left), concatenation()), std::move(sign));
  }
  return left;
}

Expr Parser::concatenation() {
  std::vector<Expr> parts;
  parts.push_back(product());
  while (skip_sign("~")) parts.push_back(product());
  return parts.size() == 1 ? std::move(parts[0]) : make(ExprKind::concat, std::move(parts));
}

Expr Parser::product() {
  Expr left = power();
  while (is_sign("*") || is_sign("/") || is_sign("//") || is_sign("%")) {
    std::string sign = take().text;
    left = make(ExprKind::binary, both(std::move(left), power()), std::move(sign));
  }
  return left;
}

Expr Parser::power() {
  Expr left = unary(true);
  while (skip_sign("**")) left = make(ExprKind::binary, both(std::move(left), unary(true)), "**");
  return left;
}

Expr Parser::unary(bool with_filter) {
  Expr value;
  if (is_sign("-") || is_sign("+")) {
    const Level level(*this);
    std::string sign = take().text;
    value = make(ExprKind::unary, one(unary(false)), std::move(sign));
  } else {
    value = primary();
  }
  value = postfix(std::move(value));
  return with_filter ? filters(std::move(value)) : value;
}

Expr Parser::primary() {
  const Level level(*this);
  const Token token = now();
  Expr constant{.line = token.line};
  switch (token.kind) {
    case TokenKind::name:
      take();
      if (token.text == "true" || token.text == "True") {
        constant.value = true;
      } else if (token.text == "false" || token.text == "False") {
        constant.value = false;
      } else if (token.text != "none" && token.text != "None") {
        constant.kind = ExprKind::name;
        constant.text = token.text;
      }
      return constant;
    case TokenKind::text: {
      std::string text;
      while (now().kind == TokenKind::text) text += take().text;
      constant.value = std::move(text);
      return constant;
    }
    case TokenKind::integer: {
      int64_t number = 0;
      const char* end = token.text.data() + token.text.size();
      if (std::from_chars(token.text.data(), end, number).ec != std::errc())
        fail(fmt::format("the integer {} is beyond 64 bits", token.text));
      take();
      constant.value = number;
      return constant;
    }
    case TokenKind::number: {
      double number = 0;
      std::from_chars(token.text.data(), token.text.data() + token.text.size(), number);
      take();
      constant.value = number;
      return constant;
    }
    default:
      break;
  }
  if (skip_sign("(")) return bracketed(")");
  if (skip_sign("[")) return bracketed("]");
  if (skip_sign("{")) return dict();
  fail_here("a value");
}

// Reads the values after "(" or "[": a list, a tuple or a value in parentheses.
Expr Parser::bracketed(std::string_view end) {
  const bool list = end == "]";
  const int line = now().line;
  std::vector<Expr> parts;
  bool comma = false;
  while (!is_sign(end)) {
    if (!parts.empty()) {
      expect_sign(",");
      comma = true;
      if (is_sign(end)) break;
    }
    parts.push_back(expression());
  }
  expect_sign(end);
  if (!list && parts.size() == 1 && !comma) return std::move(parts[0]);
  Expr made = make(list ? ExprKind::list : ExprKind::tuple, std::move(parts));
  made.line = line;
  return made;
}

Expr Parser::dict() {
  const int line = now().line;
  std::vector<Expr> parts;
  while (!is_sign("}")) {
    if (!parts.empty()) {
      expect_sign(",");
      if (is_sign("}")) break;
    }
    parts.push_back(expression());
    expect_sign(":");
    parts.push_back(expression());
  }
  expect_sign("}");
  Expr made = make(ExprKind::dict, std::move(parts));
  made.line = line;
  return made;
}

Expr Parser::postfix(Expr object) {
  while (true) {
    if (is_sign(".") || is_sign("[")) {
      object = subscript(std::move(object));
    } else if (is_sign("(")) {
      object = make(ExprKind::call, one(std::move(object)));
      arguments(object);
    } else {
      return object;
    }
  }
}

Expr Parser::filters(Expr subject) {
  while (true) {
    if (skip_sign("|")) {
      subject = filter(std::move(subject));
    } else if (is_name("is")) {
      subject = test(std::move(subject));
    } else if (is_sign("(")) {
      subject = make(ExprKind::call, one(std::move(subject)));
      arguments(subject);
    } else {
      return subject;
    }
  }
}

// Reads a filter after its "|".
Expr Parser::filter(Expr subject) {
  const int line = now().line;
  std::string name = take_name();
  Expr made = make(ExprKind::filter, one(std::move(subject)), name);
  made.line = line;
  made.builtin = find_filter(name);
  if (made.builtin == nullptr)
    throw SyntaxProblem{line, fmt::format("there is no filter '{}'", name)};
  if (is_sign("(")) arguments(made);
  return made;
}

Expr Parser::test(Expr subject) {
  expect_name("is");
  const bool negated = skip_name("not");
  const int line = now().line;
  std::string name = take_name();
  Expr made = make(ExprKind::test, one(std::move(subject)), name);
  made.line = line;
  made.builtin = find_test(name);
  if (made.builtin == nullptr)
    throw SyntaxProblem{line, fmt::format("there is no test '{}'", name)};
  constexpr std::string_view kAfter[] = {"else", "or", "and", "is", "if", "recursive"};
  const TokenKind kind = now().kind;
  if (is_sign("(")) {
    arguments(made);
  } else if (kind == TokenKind::text || kind == TokenKind::integer || kind == TokenKind::number ||
             is_sign("[") || is_sign("{") ||
             (kind == TokenKind::name &&
              std::ranges::find(kAfter, now().text) == std::end(kAfter) && !is_name("in") &&
              !is_name("not"))) {
    std::vector<Expr> parts = std::move(made.parts);
    parts.push_back(postfix(primary()));
    const Builtin* builtin = made.builtin;
    made = make(ExprKind::test, std::move(parts), std::move(name));
    made.builtin = builtin;
  }
  return negated ? make(ExprKind::unary, one(std::move(made)), "not") : std::move(made);
}

Expr Parser::subscript(Expr object) {
  if (skip_sign(".")) {
    if (now().kind == TokenKind::integer) {
      Expr key = primary();
      return make(ExprKind::item, both(std::move(object), std::move(key)));
    }
    std::string name = take_name();
    return make(ExprKind::attribute, one(std::move(object)), std::move(name));
  }
  expect_sign("[");
  if (is_sign("]")) fail_here("a key");
  std::vector<Expr> parts;
  parts.push_back(std::move(object));
  bool slice = false;
  while (parts.size() < 4) {
    const bool absent = is_sign(":") || is_sign("]");
    parts.push_back(absent ? Expr{.line = now().line} : expression());
    if (!skip_sign(":")) break;
    slice = true;
  }
  if (!slice && is_sign(",")) fail("several keys in [] are not supported");
  expect_sign("]");
  while (slice && parts.size() < 4) parts.push_back(Expr{.line = now().line});
  return make(slice ? ExprKind::slice : ExprKind::item, std::move(parts));
}

void Parser::arguments(Expr& call) {
  expect_sign("(");
  std::vector<Expr> parts = std::move(call.parts);
  bool first = true;
  while (!is_sign(")")) {
    if (!first) {
      expect_sign(",");
      if (is_sign(")")) break;
    }
    first = false;
    if (is_sign("*") || is_sign("**")) fail("arguments with * are not supported");
    if (now().kind == TokenKind::name && ahead().kind == TokenKind::sign && ahead().text == "=") {
      std::string name = take().text;
      take();
      call.named.emplace_back(std::move(name), expression());
    } else if (call.named.empty()) {
      parts.push_back(expression());
    } else {
      fail("an argument follows one with a name");
    }
  }
  expect_sign(")");
  for (const Expr& part : parts) call.depth = std::max(call.depth, part.depth + 1);
  for (const auto& [name, value] : call.named) call.depth = std::max(call.depth, value.depth + 1);
  if (call.depth > kMaxDepth) fail(fmt::format("expressions nested deeper than {}", kMaxDepth));
  call.parts = std::move(parts);
}

}  // namespace fovea::jinja
