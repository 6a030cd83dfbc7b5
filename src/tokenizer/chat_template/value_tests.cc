// SPDX-License-Identifier: Apache-2.0
// The tests of templates: `value is defined`.
#include <fmt/format.h>

#include <algorithm>

#include "tokenizer/chat_template/interpreter.h"
#include "tokenizer/chat_template/python_text.h"

namespace fovea::jinja {
namespace {

const Value& other(const Call& call) {
  if (call.arguments.positional.size() != 1 || !call.arguments.named.empty())
    throw Failure{fmt::format("the test '{}' needs one argument", call.name)};
  return call.arguments.positional[0];
}

bool is_sequence(const Value& value) {
  return value.text() || value.items() || value.dict() || value.is_undefined();
}

Value divides(const Call& call) {
  return equal(call.run.binary("%", call.subject, other(call)), int64_t{0});
}

Value is_same(const Call& call) {
  const Value &left = call.subject, &right = other(call);
  if (!left.same_type(right) || !equal(left, right)) return false;
  return left.text() == right.text() && left.items() == right.items() &&
         left.dict() == right.dict();
}

Value is_lower(const Call& call) {
  const std::string text = call.subject.str();
  return text == to_lower(text) && text != to_upper(text);
}

Value is_upper(const Call& call) {
  const std::string text = call.subject.str();
  return text == to_upper(text) && text != to_lower(text);
}

bool is_odd(const Value& value, Interpreter& run) {
  return !equal(run.binary("%", value, int64_t{2}), int64_t{0});
}

constexpr auto kEqual = [](const Call& call) -> Value { return equal(call.subject, other(call)); };
constexpr auto kUnequal = [](const Call& call) -> Value {
  return !equal(call.subject, other(call));
};
constexpr auto kLess = [](const Call& call) -> Value {
  return compare(call.subject, other(call), "<") < 0;
};
constexpr auto kLessOrEqual = [](const Call& call) -> Value {
  return compare(call.subject, other(call), "<=") <= 0;
};
constexpr auto kGreater = [](const Call& call) -> Value {
  return compare(call.subject, other(call), ">") > 0;
};
constexpr auto kGreaterOrEqual = [](const Call& call) -> Value {
  return compare(call.subject, other(call), ">=") >= 0;
};
constexpr auto kDefined = [](const Call& call) -> Value { return !call.subject.is_undefined(); };
constexpr auto kUndefined = [](const Call& call) -> Value { return call.subject.is_undefined(); };
constexpr auto kNone = [](const Call& call) -> Value { return call.subject.is_none(); };
constexpr auto kBoolean = [](const Call& call) -> Value { return call.subject.is_bool(); };
constexpr auto kTrue = [](const Call& call) -> Value {
  return call.subject.is_bool() && call.subject.truth();
};
constexpr auto kFalse = [](const Call& call) -> Value {
  return call.subject.is_bool() && !call.subject.truth();
};
constexpr auto kInteger = [](const Call& call) -> Value { return call.subject.is_integer(); };
constexpr auto kFloat = [](const Call& call) -> Value { return call.subject.is_float(); };
constexpr auto kNumber = [](const Call& call) -> Value { return call.subject.is_number(); };
constexpr auto kString = [](const Call& call) -> Value { return call.subject.text() != nullptr; };
constexpr auto kMapping = [](const Call& call) -> Value { return call.subject.dict() != nullptr; };
constexpr auto kSequence = [](const Call& call) -> Value { return is_sequence(call.subject); };
constexpr auto kIterable = [](const Call& call) -> Value {
  return is_sequence(call.subject) || call.subject.iterator() || call.subject.loop();
};
constexpr auto kCallable = [](const Call& call) -> Value {
  return call.subject.function() != nullptr;
};
constexpr auto kEven = [](const Call& call) -> Value { return !is_odd(call.subject, call.run); };
constexpr auto kOdd = [](const Call& call) -> Value { return is_odd(call.subject, call.run); };
constexpr auto kIn = [](const Call& call) -> Value {
  return call.run.contains(other(call), call.subject);
};
constexpr auto kFilter = [](const Call& call) -> Value {
  return find_filter(call.subject.str()) != nullptr;
};
constexpr auto kTest = [](const Call& call) -> Value {
  return find_test(call.subject.str()) != nullptr;
};

constexpr Builtin kTests[] = {{"==", kEqual},
                              {"eq", kEqual},
                              {"equalto", kEqual},
                              {"!=", kUnequal},
                              {"ne", kUnequal},
                              {"<", kLess},
                              {"lt", kLess},
                              {"lessthan", kLess},
                              {"<=", kLessOrEqual},
                              {"le", kLessOrEqual},
                              {">", kGreater},
                              {"gt", kGreater},
                              {"greaterthan", kGreater},
                              {">=", kGreaterOrEqual},
                              {"ge", kGreaterOrEqual},
                              {"defined", kDefined},
                              {"undefined", kUndefined},
                              {"none", kNone},
                              {"boolean", kBoolean},
                              {"true", kTrue},
                              {"false", kFalse},
                              {"integer", kInteger},
                              {"float", kFloat},
                              {"number", kNumber},
                              {"string", kString},
                              {"mapping", kMapping},
                              {"sequence", kSequence},
                              {"iterable", kIterable},
                              {"callable", kCallable},
                              {"even", kEven},
                              {"odd", kOdd},
                              {"in", kIn},
                              {"divisibleby", divides},
                              {"sameas", is_same},
                              {"lower", is_lower},
                              {"upper", is_upper},
                              {"filter", kFilter},
                              {"test", kTest}};

}  // namespace

const Builtin* find_test(std::string_view name) {
  const auto found = std::ranges::find(kTests, name, &Builtin::name);
  return found == std::end(kTests) ? nullptr : found;
}

}  // namespace fovea::jinja
