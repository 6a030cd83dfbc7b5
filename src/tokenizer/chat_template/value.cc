// SPDX-License-Identifier: Apache-2.0
#include "tokenizer/chat_template/value.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "tokenizer/chat_template/python_text.h"

namespace fovea::jinja {
namespace {

int depth_above(int depth) {
  if (depth >= Value::kMaxDepth)
    throw Failure{fmt::format("values are nested deeper than {}", Value::kMaxDepth)};
  return depth + 1;
}

int depth_of(const List& items) {
  int depth = 0;
  for (const Value& item : items) depth = std::max(depth, item.depth());
  return depth_above(depth);
}

int depth_of(const Dict& dict) {
  int depth = 0;
  for (const auto& [key, value] : dict.entries())
    depth = std::max({depth, key.depth(), value.depth()});
  return depth_above(depth);
}

std::string joined(const List& items) {
  std::string text;
  for (const Value& item : items) {
    if (!text.empty()) text += ", ";
    text += item.repr();
  }
  return text;
}

std::string dict_text(const Dict& dict) {
  std::string text;
  for (const auto& [key, value] : dict.entries()) {
    if (!text.empty()) text += ", ";
    text += key.repr() + ": " + value.repr();
  }
  return "{" + text + "}";
}

template <typename T>
int order(T left, T right) {
  return left < right ? -1 : left > right ? 1 : 0;
}

bool equal_items(const List& left, const List& right) {
  return std::ranges::equal(left, right, equal);
}

bool equal_dicts(const Dict& left, const Dict& right) {
  return left.size() == right.size() && std::ranges::all_of(left.entries(), [&](const auto& entry) {
           const Value* other = right.find(entry.first);
           return other != nullptr && equal(entry.second, *other);
         });
}

}  // namespace

Value::Value(std::string value) : data_(std::make_shared<const std::string>(std::move(value))) {}

Value::Value(List items) : depth_(depth_of(items)) {
  data_ = std::make_shared<const List>(std::move(items));
}

Value::Value(Dict dict) : depth_(depth_of(dict)) {
  data_ = std::make_shared<const Dict>(std::move(dict));
}

Value::Value(std::shared_ptr<Iterator> items) : depth_(depth_of(items->items)) {
  data_ = std::move(items);
}

Value Value::tuple(List items) {
  Value value;
  value.depth_ = depth_of(items);
  value.data_ = Tuple{std::make_shared<const List>(std::move(items))};
  return value;
}

const std::string* Value::text() const {
  const auto* text = get<Text>();
  return text ? text->get() : nullptr;
}

const List* Value::items() const {
  if (const auto* list = get<std::shared_ptr<const List>>()) return list->get();
  const auto* tuple = get<Tuple>();
  return tuple ? tuple->items.get() : nullptr;
}

const Dict* Value::dict() const {
  const auto* dict = get<std::shared_ptr<const Dict>>();
  return dict ? dict->get() : nullptr;
}

const Value::Undefined* Value::unknown() const {
  const auto* unknown = get<std::shared_ptr<const Undefined>>();
  return unknown ? unknown->get() : nullptr;
}

bool Value::truth() const {
  if (const std::string* given = text()) return !given->empty();
  if (const List* given = items()) return !given->empty();
  if (const Dict* given = dict()) return given->size() > 0;
  if (const auto* given = iterator()) return !(*given)->is_view || !(*given)->items.empty();
  if (is_number()) return number() != 0;
  return !is_none() && !is_undefined();
}

int64_t Value::integer() const {
  if (const auto* given = get<int64_t>()) return *given;
  if (const auto* given = get<bool>()) return *given;
  throw Failure{fmt::format("{} is no integer", type_name())};
}

double Value::number() const {
  if (const auto* given = get<double>()) return *given;
  return static_cast<double>(integer());
}

std::string Value::str() const {
  if (const std::string* given = text()) return *given;
  return is_undefined() ? "" : repr();
}

std::string Value::repr() const {
  if (const std::string* given = text()) return repr_of(*given);
  if (const Dict* given = dict()) return dict_text(*given);
  if (const auto* given = get<bool>()) return *given ? "True" : "False";
  if (is_integer()) return std::to_string(integer());
  if (is_float()) return float_text(number());
  if (is_none()) return "None";
  if (is_undefined()) return "Undefined";
  if (const List* given = items()) {
    if (is_list()) return "[" + joined(*given) + "]";
    return "(" + joined(*given) + (given->size() == 1 ? ",)" : ")");
  }
  if (const auto* given = iterator(); given && (*given)->is_view)
    return fmt::format("{}([{}])", (*given)->name, joined((*given)->items));
  throw Failure{fmt::format("a {} has no text", type_name())};
}

const char* Value::type_name() const {
  constexpr const char* kNames[] = {"None",     "bool",  "int",      "float",     "str",
                                    "list",     "tuple", "dict",     "Undefined", "generator",
                                    "function", "loop",  "namespace"};
  static_assert(std::size(kNames) == std::variant_size_v<decltype(data_)>);
  return kNames[data_.index()];
}

void Dict::set(Value key, Value value) {
  if (key.is_list() || key.is_dict())
    throw Failure{fmt::format("a {} cannot be a key", key.type_name())};
  if (const Value* found = find(key)) {
    const_cast<Value&>(*found) = std::move(value);
    return;
  }
  if (const std::string* text = key.text()) texts_.emplace(*text, entries_.size());
  entries_.emplace_back(std::move(key), std::move(value));
}

const Value* Dict::find(const Value& key) const {
  if (const std::string* text = key.text()) return find_text(*text);
  if (texts_.size() == entries_.size()) return nullptr;
  const auto found =
      std::ranges::find_if(entries_, [&](const Entry& entry) { return equal(entry.first, key); });
  return found == entries_.end() ? nullptr : &found->second;
}

const Value* Dict::find_text(std::string_view key) const {
  const auto found = texts_.find(key);
  return found == texts_.end() ? nullptr : &entries_[found->second].second;
}

const Value* Namespace::find(std::string_view name) const {
  const auto found = std::ranges::find(attributes, name, &std::pair<std::string, Value>::first);
  return found == attributes.end() ? nullptr : &found->second;
}

void Namespace::set(std::string_view name, Value value) {
  if (value.depth() >= Value::kMaxDepth / 2)
    throw Failure{fmt::format("a namespace cannot hold a {} in '{}'", value.type_name(), name)};
  const auto found = std::ranges::find(attributes, name, &std::pair<std::string, Value>::first);
  if (found == attributes.end()) {
    attributes.emplace_back(name, std::move(value));
  } else {
    found->second = std::move(value);
  }
}

bool equal(const Value& left, const Value& right) {
  if (left.is_number() && right.is_number()) {
    if (left.is_float() || right.is_float()) return left.number() == right.number();
    return left.integer() == right.integer();
  }
  if (!left.same_type(right)) return false;
  if (left.is_none() || left.is_undefined()) return true;
  if (left.text()) return *left.text() == *right.text();
  if (left.items()) return equal_items(*left.items(), *right.items());
  if (left.dict()) return equal_dicts(*left.dict(), *right.dict());
  if (left.iterator()) return *left.iterator() == *right.iterator();
  if (left.function()) return *left.function() == *right.function();
  if (left.loop()) return *left.loop() == *right.loop();
  return *left.space() == *right.space();
}

int compare(const Value& left, const Value& right, std::string_view sign) {
  if (left.is_number() && right.is_number()) {
    if (left.is_float() || right.is_float()) return order(left.number(), right.number());
    return order(left.integer(), right.integer());
  }
  if (left.text() && right.text()) return left.text()->compare(*right.text());
  if (left.items() && right.items() && left.same_type(right)) {
    const List &first = *left.items(), &second = *right.items();
    for (size_t i = 0; i < std::min(first.size(), second.size()); ++i)
      if (!equal(first[i], second[i])) return compare(first[i], second[i], sign);
    return order(first.size(), second.size());
  }
  throw Failure{fmt::format("'{}' is not supported between {} and {}", sign, left.type_name(),
                            right.type_name())};
}

}  // namespace fovea::jinja
