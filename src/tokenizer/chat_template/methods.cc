// SPDX-License-Identifier: Apache-2.0
// The methods of texts, dicts, lists and loops.
#include <fmt/format.h>

#include <algorithm>
#include <span>

#include "tokenizer/chat_template/interpreter.h"
#include "tokenizer/chat_template/python_text.h"
#include "tokenizer/chat_template/sequence_filters.h"
#include "tokenizer/utf8.h"

namespace fovea::jinja {
namespace {

List values_of(const Call& call, const std::vector<std::string_view>& parts) {
  call.run.charge(parts.size());
  return {parts.begin(), parts.end()};
}

Value stripped(const Call& call, Side side) {
  const Bound bound(call, {"chars"});
  return strip(text_of(call), side, bound.optional_text(0));
}

// Returns true if the text begins or ends with the argument, or with one of a tuple.
Value matches(const Call& call, bool (*match)(std::string_view, std::string_view)) {
  const Bound bound(call, {"prefix", "start"});
  if (bound.has(1)) throw Failure{fmt::format("{}() with a position is not supported", call.name)};
  if (!bound.required(0).is_tuple()) return match(text_of(call), bound.text(0));
  return std::ranges::any_of(*bound.required(0).items(), [&](const Value& part) {
    if (part.text() == nullptr) throw Failure{fmt::format("{}() needs texts", call.name)};
    return match(text_of(call), *part.text());
  });
}

Value starts_with(const Call& call) {
  return matches(
      call, [](std::string_view text, std::string_view part) { return text.starts_with(part); });
}

Value ends_with(const Call& call) {
  return matches(call,
                 [](std::string_view text, std::string_view part) { return text.ends_with(part); });
}

const std::string& separator_of(const Bound& bound) {
  const std::string& separator = bound.text(0);
  if (separator.empty()) throw Failure{"the separator is empty"};
  return separator;
}

Value split_text(const Call& call) {
  const Bound bound(call, {"sep", "maxsplit"});
  const int64_t count = bound.integer_or(1, -1);
  if (!bound.optional_text(0)) return values_of(call, split_words(text_of(call), count));
  return values_of(call, split(text_of(call), separator_of(bound), count));
}

Value split_text_from_right(const Call& call) {
  const Bound bound(call, {"sep", "maxsplit"});
  if (!bound.optional_text(0)) throw Failure{"rsplit() without a separator is not supported"};
  return values_of(call,
                   split_from_right(text_of(call), separator_of(bound), bound.integer_or(1, -1)));
}

Value partition(const Call& call, bool from_right) {
  const Bound bound(call, {"sep"});
  const std::string &text = text_of(call), &separator = separator_of(bound);
  const size_t at = from_right ? text.rfind(separator) : text.find(separator);
  if (at == text.npos)
    return from_right ? Value::tuple({"", "", text}) : Value::tuple({text, "", ""});
  return Value::tuple({text.substr(0, at), separator, text.substr(at + separator.size())});
}

Value without_prefix(const Call& call) {
  std::string_view text = text_of(call);
  const std::string& part = Bound(call, {"prefix"}).text(0);
  if (text.starts_with(part)) text.remove_prefix(part.size());
  return text;
}

Value without_suffix(const Call& call) {
  std::string_view text = text_of(call);
  const std::string& part = Bound(call, {"suffix"}).text(0);
  if (text.ends_with(part)) text.remove_suffix(part.size());
  return text;
}

Value find_text(const Call& call, bool from_right) {
  const Bound bound(call, {"sub"});
  const std::string& text = text_of(call);
  const size_t at = from_right ? text.rfind(bound.text(0)) : text.find(bound.text(0));
  if (at == text.npos && call.name.ends_with("index")) throw Failure{"the text is not found"};
  return at == text.npos ? int64_t{-1} : position_of(text, at);
}

Value count_text(const Call& call) {
  const Bound bound(call, {"sub"});
  const std::string &text = text_of(call), &part = bound.text(0);
  if (part.empty()) return length(text) + 1;
  return static_cast<int64_t>(split(text, part).size()) - 1;
}

Value replace_text(const Call& call) {
  const Bound bound(call, {"old", "new", "count"});
  return replaced(call, text_of(call), bound.text(0), bound.text(1), bound.integer_or(2, -1));
}

Value join_texts(const Call& call) {
  return joined(call, text_of(call), call.run.items_of(Bound(call, {"iterable"}).required(0)));
}

Value split_text_lines(const Call& call) {
  return values_of(call, split_lines(text_of(call), Bound(call, {"keepends"}).flag_or(0, false)));
}

Value title_text(const Call& call) {
  return titled(text_of(call), [](uint32_t point) {
    std::string character;
    append_utf8(point, character);
    return to_lower(character) == character && to_upper(character) == character;
  });
}

Value all_characters(const Call& call, bool (*holds)(uint32_t)) {
  const auto parts = characters(text_of(call));
  return !parts.empty() &&
         std::ranges::all_of(parts, [&](auto part) { return holds(code_point(part)); });
}

Value is_digits(const Call& call) {
  return all_characters(call, [](uint32_t point) { return point >= '0' && point <= '9'; });
}

constexpr Builtin kTextMethods[] = {
    {"capitalize", [](const Call& call) -> Value { return capitalized(text_of(call)); }},
    {"count", count_text},
    {"endswith", ends_with},
    {"find", [](const Call& call) { return find_text(call, false); }},
    {"format",
     [](const Call& call) -> Value { return format_braces(text_of(call), call.arguments); }},
    {"index", [](const Call& call) { return find_text(call, false); }},
    {"isalnum", [](const Call& call) { return all_characters(call, is_letter_or_digit); }},
    {"isdigit", is_digits},
    {"isspace", [](const Call& call) { return all_characters(call, is_space); }},
    {"join", join_texts},
    {"lower", [](const Call& call) -> Value { return to_lower(text_of(call)); }},
    {"lstrip", [](const Call& call) { return stripped(call, Side::left); }},
    {"partition", [](const Call& call) { return partition(call, false); }},
    {"removeprefix", without_prefix},
    {"removesuffix", without_suffix},
    {"replace", replace_text},
    {"rfind", [](const Call& call) { return find_text(call, true); }},
    {"rindex", [](const Call& call) { return find_text(call, true); }},
    {"rpartition", [](const Call& call) { return partition(call, true); }},
    {"rsplit", split_text_from_right},
    {"rstrip", [](const Call& call) { return stripped(call, Side::right); }},
    {"split", split_text},
    {"splitlines", split_text_lines},
    {"startswith", starts_with},
    {"strip", [](const Call& call) { return stripped(call, Side::both); }},
    {"title", title_text},
    {"upper", [](const Call& call) -> Value { return to_upper(text_of(call)); }}};

Value view(const Call& call, const char* name, Value (*part)(const Dict::Entry&)) {
  List items;
  for (const Dict::Entry& entry : call.subject.dict()->entries()) items.push_back(part(entry));
  call.run.charge(items.size());
  return std::make_shared<Iterator>(Iterator{std::move(items), name, true});
}

Value dict_get(const Call& call) {
  const Bound bound(call, {"key", "default"});
  const Value* found = call.subject.dict()->find(bound.required(0));
  return found ? *found : bound.value_or(1, {});
}

[[noreturn]] Value refuse(const Call& call) {
  throw Failure{fmt::format("{}() of a {} is not supported; templates change no values", call.name,
                            call.subject.type_name())};
}

constexpr Builtin kDictMethods[] = {
    {"copy", [](const Call& call) { return call.subject; }},
    {"get", dict_get},
    {"items",
     [](const Call& call) {
       return view(call, "dict_items", [](const Dict::Entry& entry) {
         return Value::tuple({entry.first, entry.second});
       });
     }},
    {"keys",
     [](const Call& call) {
       return view(call, "dict_keys", [](const Dict::Entry& entry) { return entry.first; });
     }},
    {"values",
     [](const Call& call) {
       return view(call, "dict_values", [](const Dict::Entry& entry) { return entry.second; });
     }},
    {"clear", refuse},
    {"fromkeys", refuse},
    {"pop", refuse},
    {"popitem", refuse},
    {"setdefault", refuse},
    {"update", refuse}};

Value count_item(const Call& call) {
  const Bound bound(call, {"value"});
  return static_cast<int64_t>(std::ranges::count_if(
      *call.subject.items(), [&](const Value& item) { return equal(item, bound.required(0)); }));
}

Value index_of_item(const Call& call) {
  const Bound bound(call, {"value"});
  const List& items = *call.subject.items();
  const auto found = std::ranges::find_if(
      items, [&](const Value& item) { return equal(item, bound.required(0)); });
  if (found == items.end()) throw Failure{"the value is not in the list"};
  return static_cast<int64_t>(found - items.begin());
}

constexpr Builtin kListMethods[] = {{"copy", [](const Call& call) { return call.subject; }},
                                    {"count", count_item},
                                    {"index", index_of_item},
                                    {"append", refuse},
                                    {"clear", refuse},
                                    {"extend", refuse},
                                    {"insert", refuse},
                                    {"pop", refuse},
                                    {"remove", refuse},
                                    {"reverse", refuse},
                                    {"sort", refuse}};

Value loop_cycle(const Call& call) {
  const List& given = call.arguments.positional;
  if (given.empty()) throw Failure{"cycle() needs arguments"};
  return given[(*call.subject.loop())->index % given.size()];
}

Value loop_changed(const Call& call) {
  Loop& loop = **call.subject.loop();
  const List& given = call.arguments.positional;
  for (const Value& value : given) {
    if (value.depth() >= Value::kMaxDepth / 2)
      throw Failure{fmt::format("changed() cannot keep a {}", value.type_name())};
  }
  if (loop.has_changed && std::ranges::equal(loop.changed, given, equal)) return false;
  loop.has_changed = true;
  loop.changed = given;
  return true;
}

constexpr Builtin kLoopMethods[] = {{"changed", loop_changed}, {"cycle", loop_cycle}};

const Builtin* find_in(std::span<const Builtin> methods, std::string_view name) {
  const auto found = std::ranges::find(methods, name, &Builtin::name);
  return found == methods.end() ? nullptr : &*found;
}

}  // namespace

const Builtin* find_method(const Value& object, std::string_view name) {
  if (object.text()) return find_in(kTextMethods, name);
  if (object.dict()) return find_in(kDictMethods, name);
  if (object.items()) return find_in(kListMethods, name);
  return object.loop() ? find_in(kLoopMethods, name) : nullptr;
}

}  // namespace fovea::jinja
