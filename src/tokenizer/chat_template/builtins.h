// SPDX-License-Identifier: Apache-2.0
// Filters, tests, methods and global functions.
#pragma once

#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tokenizer/chat_template/value.h"

namespace fovea::jinja {

class Interpreter;

struct Arguments {
  List positional = {};
  std::vector<std::pair<std::string, Value>> named = {};
};

// A call of a builtin. `subject` is the value before "|", "is" or ".", or None.
struct Call {
  Interpreter& run;
  std::string_view name;
  const Value& subject;
  const Arguments& arguments;
};

struct Builtin {
  std::string_view name;
  Value (*call)(const Call& call);
};

// Each returns null for an unknown name.
const Builtin* find_filter(std::string_view name);
const Builtin* find_test(std::string_view name);
const Builtin* find_method(const Value& object, std::string_view name);
const Builtin* find_global(std::string_view name);

// The arguments of a call in the order of its parameters.
class Bound {
 public:
  // Throws Failure for arguments without a parameter.
  Bound(const Call& call, std::initializer_list<std::string_view> parameters);

  bool has(size_t i) const { return values_[i].has_value(); }
  const Value& required(size_t i) const;
  Value value_or(size_t i, Value fallback) const { return values_[i].value_or(fallback); }
  int64_t integer_or(size_t i, int64_t fallback) const;
  bool flag_or(size_t i, bool fallback) const;
  const std::string& text(size_t i) const;
  // None counts as absent.
  std::optional<std::string_view> optional_text(size_t i) const;

 private:
  std::string_view callee_;
  std::vector<std::string_view> names_;
  std::vector<std::optional<Value>> values_;
};

// Returns the text, or throws Failure for other values.
const std::string& text_of(const Call& call);

struct JsonStyle {
  bool ascii = false;
  bool sorted = false;
  std::optional<std::string> indent = {};  // unset: one line
  std::string item_separator = ", ";
  std::string key_separator = ": ";
};
// Writes what json.dumps() of Python writes. Throws Failure for values that JSON has not.
std::string write_json(const Value& value, const JsonStyle& style);

// Returns the text of printf-like (`%s`) and of brace (`{}`) formats.
std::string format_percent(std::string_view format, const List& values);
std::string format_braces(std::string_view format, const Arguments& arguments);

}  // namespace fovea::jinja
