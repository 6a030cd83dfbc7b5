// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "tokenizer/chat_template/interpreter.h"
#include "tokenizer/chat_template/python_text.h"

namespace fovea::jinja {
namespace {

[[noreturn]] void fail_undefined(const Value& value) {
  throw Failure{fmt::format("'{}' is undefined", value.unknown()->name)};
}

// Returns the position of an item, or nullopt outside of the list.
std::optional<size_t> place_of(const Value& key, size_t size) {
  if (!key.is_integer() && !key.is_bool()) return std::nullopt;
  const int64_t count = static_cast<int64_t>(size);
  const int64_t at = key.integer() < 0 ? key.integer() + count : key.integer();
  if (at < 0 || at >= count) return std::nullopt;
  return static_cast<size_t>(at);
}

std::optional<Value> character_at(const std::string& text, const Value& key) {
  const auto parts = characters(text);
  const auto at = place_of(key, parts.size());
  if (!at) return std::nullopt;
  return Value(parts[*at]);
}

std::optional<Value> loop_attribute(const Loop& loop, std::string_view name) {
  const auto index = static_cast<int64_t>(loop.index);
  const auto size = static_cast<int64_t>(loop.items.size());
  if (name == "index") return index + 1;
  if (name == "index0") return index;
  if (name == "revindex") return size - index;
  if (name == "revindex0") return size - index - 1;
  if (name == "first") return index == 0;
  if (name == "last") return index + 1 == size;
  if (name == "length") return size;
  if (name == "depth") return int64_t{1};
  if (name == "depth0") return int64_t{0};
  if (name == "previtem" && index > 0) return loop.items[loop.index - 1];
  if (name == "nextitem" && index + 1 < size) return loop.items[loop.index + 1];
  return std::nullopt;
}

[[noreturn]] void fail_operands(std::string_view sign, const Value& left, const Value& right) {
  throw Failure{fmt::format("'{}' is not supported between {} and {}", sign, left.type_name(),
                            right.type_name())};
}

// A reference, because `overflow` may be evaluated last.
int64_t checked(bool overflow, const int64_t& result) {
  if (overflow) throw Failure{"the result is beyond 64 bits"};
  return result;
}

int64_t integer_power(int64_t base, int64_t exponent) {
  int64_t result = 1;
  if (base == 1 || exponent == 0) return 1;
  if (base == 0) return 0;
  if (base == -1) return exponent % 2 == 0 ? 1 : -1;
  for (; exponent > 0; --exponent)
    result = checked(__builtin_mul_overflow(result, base, &result), result);
  return result;
}

// Rounds towards minus infinity, as Python does.
int64_t floor_quotient(int64_t left, int64_t right) {
  if (right == -1) return checked(__builtin_sub_overflow(int64_t{0}, left, &left), left);
  const int64_t quotient = left / right;
  return quotient - (left % right != 0 && (left < 0) != (right < 0));
}

Value integer_result(std::string_view sign, int64_t left, int64_t right) {
  int64_t result = 0;
  if (sign == "+") return checked(__builtin_add_overflow(left, right, &result), result);
  if (sign == "-") return checked(__builtin_sub_overflow(left, right, &result), result);
  if (sign == "*") return checked(__builtin_mul_overflow(left, right, &result), result);
  if (sign == "**") {
    if (right >= 0) return integer_power(left, right);
    return std::pow(static_cast<double>(left), static_cast<double>(right));
  }
  if (right == 0) throw Failure{"division by zero"};
  if (sign == "/") return static_cast<double>(left) / static_cast<double>(right);
  if (sign == "//") return floor_quotient(left, right);
  return right == -1 ? int64_t{0} : left - floor_quotient(left, right) * right;
}

Value float_result(std::string_view sign, double left, double right) {
  if (sign == "+") return left + right;
  if (sign == "-") return left - right;
  if (sign == "*") return left * right;
  if (sign == "**") return std::pow(left, right);
  if (right == 0) throw Failure{"division by zero"};
  if (sign == "/") return left / right;
  if (sign == "//") return std::floor(left / right);
  const double rest = std::fmod(left, right);
  return rest != 0 && (rest < 0) != (right < 0) ? rest + right : rest;
}

// Returns the positions that [start:stop:step] names.
std::vector<size_t> positions(const Value& start, const Value& stop, const Value& step,
                              size_t size) {
  const int64_t count = static_cast<int64_t>(size);
  const int64_t stride = step.is_none() ? 1 : step.integer();
  if (stride == 0) throw Failure{"the step of a slice is 0"};
  const int64_t low = stride > 0 ? 0 : -1, high = stride > 0 ? count : count - 1;
  const auto bound = [&](const Value& given, int64_t absent) {
    if (given.is_none()) return absent;
    const int64_t at = given.integer();
    return std::clamp(at < 0 ? at + count : at, low, high);
  };
  const int64_t last = bound(stop, stride > 0 ? high : low);
  std::vector<size_t> result;
  for (int64_t at = bound(start, stride > 0 ? low : high); stride > 0 ? at < last : at > last;) {
    result.push_back(static_cast<size_t>(at));
    if (__builtin_add_overflow(at, stride, &at)) break;
  }
  return result;
}

}  // namespace

List Interpreter::items_of(const Value& value) {
  List items;
  if (const List* list = value.items()) {
    items = *list;
  } else if (const Dict* dict = value.dict()) {
    for (const auto& [key, unused] : dict->entries()) items.push_back(key);
  } else if (const std::string* text = value.text()) {
    charge(text->size());
    for (const std::string_view character : characters(*text)) items.emplace_back(character);
  } else if (const auto* iterator = value.iterator()) {
    items = (*iterator)->items;
    if (!(*iterator)->is_view) (*iterator)->items.clear();
  } else if (!value.is_undefined()) {
    throw Failure{fmt::format("a {} is no list", value.type_name())};
  }
  charge(items.size());
  return items;
}

Value Interpreter::attribute(const Value& object, const std::string& name) {
  if (object.is_undefined()) fail_undefined(object);
  if (const auto* space = object.space()) {
    const Value* found = (*space)->find(name);
    return found ? *found : Value::undefined(name);
  }
  if (const auto* loop = object.loop()) {
    if (const auto found = loop_attribute(**loop, name)) return *found;
  }
  if (const Builtin* method = find_method(object, name))
    return std::make_shared<const Function>(Function{name, method, object});
  if (const Dict* dict = object.dict()) {
    if (const Value* found = dict->find_text(name)) return *found;
  }
  return Value::undefined(name);
}

Value Interpreter::item(const Value& object, const Value& key) {
  if (object.is_undefined()) fail_undefined(object);
  if (const Dict* dict = object.dict()) {
    if (const Value* found = dict->find(key)) return *found;
  } else if (const List* list = object.items()) {
    if (const auto at = place_of(key, list->size())) return (*list)[*at];
  } else if (const std::string* text = object.text()) {
    if (const auto found = character_at(*text, key)) return *found;
  }
  if (key.text() == nullptr) return Value::undefined(key.repr());
  if (object.dict()) {
    const Builtin* method = find_method(object, *key.text());
    if (method == nullptr) return Value::undefined(*key.text());
    return std::make_shared<const Function>(Function{*key.text(), method, object});
  }
  return attribute(object, *key.text());
}

Value Interpreter::slice(const Value& object, const Value& start, const Value& stop,
                         const Value& step) {
  if (object.is_undefined()) fail_undefined(object);
  if (const std::string* text = object.text()) {
    const auto parts = characters(*text);
    std::string result;
    for (const size_t at : positions(start, stop, step, parts.size())) result += parts[at];
    return result;
  }
  const List* list = object.items();
  if (list == nullptr) throw Failure{fmt::format("a {} has no slices", object.type_name())};
  List result;
  for (const size_t at : positions(start, stop, step, list->size())) result.push_back((*list)[at]);
  charge(result.size());
  return object.is_tuple() ? Value::tuple(std::move(result)) : Value(std::move(result));
}

bool Interpreter::contains(const Value& container, const Value& item) {
  if (const std::string* text = container.text()) {
    if (item.text() == nullptr)
      throw Failure{fmt::format("a text cannot contain a {}", item.type_name())};
    return text->find(*item.text()) != text->npos;
  }
  if (const Dict* dict = container.dict()) return dict->find(item) != nullptr;
  return std::ranges::any_of(items_of(container),
                             [&](const Value& candidate) { return equal(candidate, item); });
}

Value Interpreter::binary(std::string_view sign, const Value& left, const Value& right) {
  if (left.is_undefined()) fail_undefined(left);
  if (right.is_undefined()) fail_undefined(right);
  if (left.is_number() && right.is_number()) {
    if (left.is_float() || right.is_float())
      return float_result(sign, left.number(), right.number());
    return integer_result(sign, left.integer(), right.integer());
  }
  if (sign == "+" && left.same_type(right)) {
    if (left.text()) return *left.text() + *right.text();
    if (const List* list = left.items()) {
      List joined = *list;
      joined.insert(joined.end(), right.items()->begin(), right.items()->end());
      charge(joined.size());
      return left.is_tuple() ? Value::tuple(std::move(joined)) : Value(std::move(joined));
    }
  }
  if (sign == "*" && right.text() && left.is_number()) return binary(sign, right, left);
  if (sign == "*" && left.text() && (right.is_integer() || right.is_bool())) {
    const auto times = static_cast<size_t>(std::max<int64_t>(right.integer(), 0));
    const std::string& text = *left.text();
    if (text.empty()) return left;
    charge_bytes(std::min(times, limits_.text_bytes + 1) * text.size());
    std::string result;
    for (size_t i = 0; i < times; ++i) result += text;
    return result;
  }
  if (sign == "%" && left.text()) {
    return format_percent(*left.text(), right.is_tuple() ? *right.items() : List{right});
  }
  fail_operands(sign, left, right);
}

}  // namespace fovea::jinja
