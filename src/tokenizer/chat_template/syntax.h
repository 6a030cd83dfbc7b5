// SPDX-License-Identifier: Apache-2.0
// The tree of a parsed template.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "tokenizer/chat_template/value.h"

namespace fovea::jinja {

struct Builtin;  // a filter or a test

enum class ExprKind : uint8_t {
  constant,     // value
  name,         // text
  list,         // parts
  tuple,        // parts
  dict,         // parts: key, value, key, value, ...
  unary,        // text: "-", "+" or "not"
  binary,       // text: the operator; parts: left, right
  logic_and,    // parts: left, right
  logic_or,     // parts: left, right
  concat,       // parts, joined as texts
  comparison,   // parts: operands; signs: the operators between them
  conditional,  // parts: condition, value, and the value if it is false (optional)
  attribute,    // parts: object; text
  item,         // parts: object, key
  slice,        // parts: object, start, stop, step; absent ones are constants of None
  call,         // parts: callee, then arguments
  filter,       // parts: subject, then arguments; builtin. An absent subject is a block's text.
  test,         // parts: subject, then arguments; builtin
};

struct Expr {
  ExprKind kind = ExprKind::constant;
  int line = 0;
  int depth = 1;  // levels of expressions, this one included
  std::string text = {};
  Value value = {};
  std::vector<Expr> parts = {};
  std::vector<std::string> signs = {};
  std::vector<std::pair<std::string, Expr>> named = {};  // arguments by keyword
  const Builtin* builtin = nullptr;
};

enum class StatementKind : uint8_t {
  text,       // text
  output,     // value
  if_else,    // branches: conditions with bodies; one without a condition is the last
  for_loop,   // target, value, condition (optional), body, otherwise
  assign,     // target, value
  set_block,  // target, body, filters in `value` (optional)
  macro,      // text: the name; parameters, body
  call,       // value: a call; parameters, body: of caller()
  filtered,   // value: filters; body
  scope,      // body in a scope of its own; assignments: of `with`
  go_on,      // continue
  leave,      // break
};

struct Statement;
using Block = std::vector<Statement>;

struct Branch;

// A target of an assignment: a name, an attribute of a namespace, or several targets.
struct Target {
  std::string name;
  std::string attribute = {};
  std::vector<Target> parts = {};  // the targets of a tuple; the name is then empty
};

struct Parameter {
  std::string name;
  std::vector<Expr> fallback = {};  // empty: required
};

struct Statement {
  StatementKind kind = StatementKind::text;
  int line = 0;
  std::string text = {};
  std::vector<Expr> value = {};      // empty if it is absent
  std::vector<Expr> condition = {};  // the filter of a loop; empty if it is absent
  Target target = {};
  std::vector<Parameter> parameters = {};
  std::vector<Branch> branches = {};
  std::vector<std::pair<Target, Expr>> assignments = {};
  Block body = {};
  Block otherwise = {};
};

struct Branch {
  std::vector<Expr> condition;  // empty: always
  Block body;
};

}  // namespace fovea::jinja
