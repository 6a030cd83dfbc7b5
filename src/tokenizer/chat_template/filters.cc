// SPDX-License-Identifier: Apache-2.0
// Filters of texts and numbers; sequence_filters.cc has those of lists.
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>

#include "tokenizer/chat_template/interpreter.h"
#include "tokenizer/chat_template/python_text.h"
#include "tokenizer/chat_template/sequence_filters.h"
#include "tokenizer/utf8.h"

namespace fovea::jinja {
namespace {

constexpr int64_t kMaxIndent = 1000;

Value filter_default(const Call& call) {
  const Bound bound(call, {"default_value", "boolean"});
  const bool replaced =
      call.subject.is_undefined() || (bound.flag_or(1, false) && !call.subject.truth());
  return replaced ? bound.value_or(0, "") : call.subject;
}

Value filter_trim(const Call& call) {
  const Bound bound(call, {"chars"});
  return strip(call.subject.str(), Side::both, bound.optional_text(0));
}

Value filter_upper(const Call& call) { return to_upper(call.subject.str()); }
Value filter_lower(const Call& call) { return to_lower(call.subject.str()); }
Value filter_capitalize(const Call& call) { return capitalized(call.subject.str()); }

Value filter_title(const Call& call) {
  return titled(call.subject.str(), [](uint32_t point) {
    return is_space(point) ||
           (point < 128 &&
            std::string_view("-({[<").find(static_cast<char>(point)) != std::string_view::npos);
  });
}

Value filter_string(const Call& call) { return call.subject.str(); }
Value filter_same(const Call& call) { return call.subject; }

Value filter_length(const Call& call) {
  const Value& value = call.subject;
  if (const std::string* text = value.text()) return length(*text);
  if (const List* list = value.items()) return static_cast<int64_t>(list->size());
  if (const Dict* dict = value.dict()) return static_cast<int64_t>(dict->size());
  if (const auto* loop = value.loop()) return static_cast<int64_t>((*loop)->items.size());
  if (value.is_undefined()) return int64_t{0};
  if (const auto* iterator = value.iterator(); iterator && (*iterator)->is_view)
    return static_cast<int64_t>((*iterator)->items.size());
  throw Failure{fmt::format("a {} has no length", value.type_name())};
}

Value filter_replace(const Call& call) {
  const Bound bound(call, {"old", "new", "count"});
  const std::string text = call.subject.str(), old = bound.required(0).str(),
                    with = bound.required(1).str();
  const bool all = !bound.has(2) || bound.required(2).is_none();
  return replaced(call, text, old, with, all ? -1 : bound.integer_or(2, -1));
}

std::optional<double> parse_float(std::string_view text) {
  text = strip(text);
  if (text.starts_with('+')) text.remove_prefix(1);
  double number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return number;
}

std::optional<int64_t> parse_integer(std::string_view text, int base) {
  text = strip(text);
  if (text.starts_with('+')) text.remove_prefix(1);
  int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number, base);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return number;
}

Value filter_int(const Call& call) {
  const Bound bound(call, {"default", "base"});
  const Value fallback = bound.value_or(0, int64_t{0});
  std::optional<double> number;
  if (const std::string* text = call.subject.text()) {
    const int64_t base = bound.integer_or(1, 10);
    if (base < 2 || base > 36) throw Failure{fmt::format("the base {} is not in [2, 36]", base)};
    if (const auto whole = parse_integer(*text, static_cast<int>(base))) return *whole;
    number = parse_float(*text);
  } else if (call.subject.is_float()) {
    number = call.subject.number();
  } else if (call.subject.is_number()) {
    return call.subject.integer();
  }
  if (!number || !(std::abs(*number) < 9e18)) return fallback;
  return static_cast<int64_t>(*number);
}

Value filter_float(const Call& call) {
  const Bound bound(call, {"default"});
  if (call.subject.is_number()) return call.subject.number();
  const std::string* text = call.subject.text();
  const auto number = text ? parse_float(*text) : std::nullopt;
  return number ? Value(*number) : bound.value_or(0, 0.0);
}

Value filter_abs(const Call& call) {
  if (call.subject.is_float()) return std::abs(call.subject.number());
  return call.subject.integer() < 0 ? call.run.binary("-", int64_t{0}, call.subject) : call.subject;
}

Value filter_round(const Call& call) {
  const Bound bound(call, {"precision", "method"});
  const std::string method(bound.optional_text(1).value_or("common"));
  const int64_t precision = bound.integer_or(0, 0);
  if (precision < 0 || precision > 300)
    throw Failure{fmt::format("the precision {} is not in [0, 300]", precision)};
  const double number = call.subject.number(), scale = std::pow(10.0, precision);
  if (method == "ceil") return std::ceil(number * scale) / scale;
  if (method == "floor") return std::floor(number * scale) / scale;
  if (method != "common") throw Failure{fmt::format("the method '{}' is unknown", method)};
  if (!call.subject.is_float()) return call.subject;
  // The longest text has 309 digits before the point and 300 after it.
  char text[640];
  const auto end = std::to_chars(text, std::end(text), number, std::chars_format::fixed,
                                 static_cast<int>(precision));
  return parse_float({text, end.ptr}).value_or(number);
}

Value filter_tojson(const Call& call) {
  const Bound bound(call, {"ensure_ascii", "indent", "separators", "sort_keys"});
  JsonStyle style{.ascii = bound.flag_or(0, false), .sorted = bound.flag_or(3, false)};
  if (bound.has(1) && !bound.required(1).is_none()) {
    const Value& indent = bound.required(1);
    const int64_t spaces = indent.text() ? length(*indent.text()) : bound.integer_or(1, 0);
    if (spaces > kMaxIndent)
      throw Failure{fmt::format("the indent {} is above {}", spaces, kMaxIndent)};
    style.indent = indent.text()
                       ? *indent.text()
                       : std::string(static_cast<size_t>(std::max<int64_t>(spaces, 0)), ' ');
    style.item_separator = ",";
  }
  if (bound.has(2) && !bound.required(2).is_none()) {
    const List* separators = bound.required(2).items();
    if (separators == nullptr || separators->size() != 2 || !(*separators)[0].text() ||
        !(*separators)[1].text())
      throw Failure{"'separators' of tojson() must be two texts"};
    style.item_separator = *(*separators)[0].text();
    style.key_separator = *(*separators)[1].text();
  }
  return write_json(call.subject, style);
}

Value filter_indent(const Call& call) {
  const Bound bound(call, {"width", "first", "blank"});
  const bool by_text = bound.has(0) && bound.required(0).text() != nullptr;
  const int64_t width = by_text ? 0 : bound.integer_or(0, 4);
  if (width > kMaxIndent) throw Failure{fmt::format("the width {} is above {}", width, kMaxIndent)};
  const std::string indent =
      by_text ? bound.text(0) : std::string(static_cast<size_t>(std::max<int64_t>(width, 0)), ' ');
  const std::string text = call.subject.str() + "\n";
  const auto lines = split_lines(text);
  call.run.charge_bytes(lines.size() * indent.size());
  std::string result = bound.flag_or(1, false) ? indent : "";
  for (size_t i = 0; i < lines.size(); ++i) {
    if (i > 0) result += '\n';
    if (i > 0 && (bound.flag_or(2, false) || !lines[i].empty())) result += indent;
    result += lines[i];
  }
  return result;
}

Value filter_truncate(const Call& call) {
  const Bound bound(call, {"length", "killwords", "end", "leeway"});
  const std::string text = call.subject.str(), end(bound.optional_text(2).value_or("..."));
  const int64_t limit = bound.integer_or(0, 255), leeway = bound.integer_or(3, 5);
  if (limit < length(end) || leeway < 0)
    throw Failure{fmt::format("truncate() to {} with leeway {} has no result", limit, leeway)};
  const auto parts = characters(text);
  if (parts.size() <= static_cast<size_t>(limit) + static_cast<size_t>(leeway)) return text;
  std::string kept;
  for (int64_t i = 0; i < limit - length(end); ++i) kept += parts[static_cast<size_t>(i)];
  if (!bound.flag_or(1, false)) kept = split_from_right(kept, " ", 1)[0];
  return kept + end;
}

Value filter_wordcount(const Call& call) {
  int64_t words = 0;
  bool inside = false;
  for (const std::string_view character : characters(call.subject.str())) {
    const bool letter = character == "_" || is_letter_or_digit(code_point(character));
    words += letter && !inside;
    inside = letter;
  }
  return words;
}

Value filter_format(const Call& call) {
  if (!call.arguments.named.empty()) throw Failure{"format() with names is not supported"};
  return format_percent(call.subject.str(), call.arguments.positional);
}

Value filter_attr(const Call& call) {
  const Bound bound(call, {"name"});
  if (call.subject.dict() && !find_method(call.subject, bound.text(0)))
    return Value::undefined(bound.text(0));
  return call.run.attribute(call.subject, bound.text(0));
}

constexpr Builtin kFilters[] = {{"abs", filter_abs},
                                {"attr", filter_attr},
                                {"capitalize", filter_capitalize},
                                {"count", filter_length},
                                {"d", filter_default},
                                {"default", filter_default},
                                {"float", filter_float},
                                {"format", filter_format},
                                {"indent", filter_indent},
                                {"int", filter_int},
                                {"length", filter_length},
                                {"lower", filter_lower},
                                {"replace", filter_replace},
                                {"round", filter_round},
                                {"safe", filter_same},
                                {"string", filter_string},
                                {"title", filter_title},
                                {"tojson", filter_tojson},
                                {"trim", filter_trim},
                                {"truncate", filter_truncate},
                                {"upper", filter_upper},
                                {"wordcount", filter_wordcount}};

}  // namespace

Value replaced(const Call& call, std::string_view text, std::string_view old, std::string_view with,
               int64_t count) {
  if (with.size() > old.size()) {
    size_t found = old.empty() ? text.size() + 1 : 0;
    for (size_t at = 0; !old.empty() && (at = text.find(old, at)) != text.npos; at += old.size())
      ++found;
    if (count >= 0) found = std::min(found, static_cast<size_t>(count));
    call.run.charge_bytes(found * with.size());
  }
  return replace_all(text, old, with, count);
}

const Builtin* find_filter(std::string_view name) {
  const auto found = std::ranges::find(kFilters, name, &Builtin::name);
  return found != std::end(kFilters) ? found : find_sequence_filter(name);
}

}  // namespace fovea::jinja
