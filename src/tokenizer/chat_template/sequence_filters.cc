// SPDX-License-Identifier: Apache-2.0
#include "tokenizer/chat_template/sequence_filters.h"

#include <fmt/format.h>

#include <algorithm>

#include "tokenizer/chat_template/interpreter.h"
#include "tokenizer/chat_template/python_text.h"

namespace fovea::jinja {
namespace {

Value generator(List items) {
  return std::make_shared<Iterator>(Iterator{std::move(items), "generator"});
}

List items_of(const Call& call) { return call.run.items_of(call.subject); }

// Returns the attribute that a path names: "function.name", "0", or an index.
Value attribute_by_path(const Call& call, Value object, const Value& path) {
  if (path.is_none()) return object;
  if (path.text() == nullptr) return call.run.item(object, path);
  for (const std::string_view part : split(*path.text(), ".")) {
    const bool digits = !part.empty() && part.find_first_not_of("0123456789") == part.npos;
    object = call.run.item(
        object, digits && part.size() < 10 ? Value(int64_t{std::stol(std::string(part))}) : part);
  }
  return object;
}

Value without_case(Value value) {
  return value.text() ? Value(to_lower(*value.text())) : std::move(value);
}

Value filter_list(const Call& call) { return items_of(call); }

Value filter_first(const Call& call) {
  const List items = items_of(call);
  return items.empty() ? Value::undefined("the first item of an empty list") : items.front();
}

Value filter_last(const Call& call) {
  if (const auto* iterator = call.subject.iterator(); iterator && !(*iterator)->is_view)
    throw Failure{"a generator has no last item"};
  const List items = items_of(call);
  return items.empty() ? Value::undefined("the last item of an empty list") : items.back();
}

Value filter_join(const Call& call) {
  const Bound bound(call, {"d", "attribute"});
  List items = items_of(call);
  for (Value& item : items) item = attribute_by_path(call, item, bound.value_or(1, {})).str();
  return joined(call, bound.value_or(0, "").str(), items);
}

Value filter_reverse(const Call& call) {
  List items = items_of(call);
  std::ranges::reverse(items);
  if (call.subject.text() == nullptr) return generator(std::move(items));
  return joined(call, "", items);
}

Value filter_items(const Call& call) {
  if (call.subject.is_undefined()) return generator({});
  if (call.subject.dict() == nullptr)
    throw Failure{fmt::format("a {} has no items", call.subject.type_name())};
  List items;
  for (const auto& [key, value] : call.subject.dict()->entries())
    items.push_back(Value::tuple({key, value}));
  call.run.charge(items.size());
  return generator(std::move(items));
}

Value filter_map(const Call& call) {
  List items = items_of(call);
  const Arguments& given = call.arguments;
  if (given.positional.empty()) {
    const Bound bound(call, {"attribute", "default"});
    for (Value& item : items) {
      item = attribute_by_path(call, item, bound.required(0));
      if (item.is_undefined() && bound.has(1)) item = bound.required(1);
    }
    return generator(std::move(items));
  }
  const std::string* name = given.positional[0].text();
  const Builtin* filter = name ? find_filter(*name) : nullptr;
  if (filter == nullptr)
    throw Failure{fmt::format("there is no filter {}", given.positional[0].repr())};
  const Arguments rest{{given.positional.begin() + 1, given.positional.end()}, given.named};
  for (Value& item : items) item = filter->call({call.run, *name, item, rest});
  return generator(std::move(items));
}

// Keeps items whose test, the argument at `first`, gives `wanted`. With an attribute, the test
// reads that of the item.
Value filtered(const Call& call, bool by_attribute, bool wanted) {
  const Arguments& given = call.arguments;
  const size_t first = by_attribute ? 1 : 0;
  if (given.positional.size() < first)
    throw Failure{fmt::format("{}() needs an attribute", call.name)};
  const Builtin* test = nullptr;
  std::string name;
  Arguments rest{{}, given.named};
  if (given.positional.size() > first) {
    name = given.positional[first].str();
    test = find_test(name);
    if (test == nullptr) throw Failure{fmt::format("there is no test '{}'", name)};
    rest.positional.assign(given.positional.begin() + static_cast<int64_t>(first) + 1,
                           given.positional.end());
  }
  List kept;
  for (const Value& item : items_of(call)) {
    const Value tested = by_attribute ? attribute_by_path(call, item, given.positional[0]) : item;
    const bool holds = test ? test->call({call.run, name, tested, rest}).truth() : tested.truth();
    if (holds == wanted) kept.push_back(item);
  }
  return generator(std::move(kept));
}

Value filter_select(const Call& call) { return filtered(call, false, true); }
Value filter_reject(const Call& call) { return filtered(call, false, false); }
Value filter_selectattr(const Call& call) { return filtered(call, true, true); }
Value filter_rejectattr(const Call& call) { return filtered(call, true, false); }

// Returns the keys by which items are compared.
List keys_of(const Call& call, const List& items, const Value& attribute, bool case_sensitive) {
  List keys;
  for (const Value& item : items) {
    Value key = attribute_by_path(call, item, attribute);
    keys.push_back(case_sensitive ? key : without_case(key));
  }
  return keys;
}

// Returns the order of the keys, in which equal ones keep their places.
std::vector<size_t> sorted_places(const Call& call, const List& keys, bool reverse) {
  std::vector<size_t> places(keys.size());
  for (size_t i = 0; i < places.size(); ++i) places[i] = i;
  std::ranges::stable_sort(places, [&](size_t left, size_t right) {
    call.run.charge(1);
    return reverse ? compare(keys[right], keys[left]) < 0 : compare(keys[left], keys[right]) < 0;
  });
  return places;
}

Value filter_sort(const Call& call) {
  const Bound bound(call, {"reverse", "case_sensitive", "attribute"});
  const List items = items_of(call);
  const List keys = keys_of(call, items, bound.value_or(2, {}), bound.flag_or(1, false));
  List sorted;
  for (const size_t place : sorted_places(call, keys, bound.flag_or(0, false)))
    sorted.push_back(items[place]);
  return sorted;
}

Value filter_dictsort(const Call& call) {
  const Bound bound(call, {"case_sensitive", "by", "reverse"});
  const Dict* dict = call.subject.dict();
  if (dict == nullptr) throw Failure{fmt::format("a {} has no keys", call.subject.type_name())};
  const std::string_view by = bound.optional_text(1).value_or("key");
  if (by != "key" && by != "value")
    throw Failure{fmt::format("'by' of dictsort() is '{}', must be 'key' or 'value'", by)};
  List items;
  for (const auto& [key, value] : dict->entries()) items.push_back(Value::tuple({key, value}));
  const List keys = keys_of(call, items, int64_t{by == "value"}, bound.flag_or(0, false));
  List sorted;
  for (const size_t place : sorted_places(call, keys, bound.flag_or(2, false)))
    sorted.push_back(items[place]);
  return sorted;
}

Value filter_unique(const Call& call) {
  const Bound bound(call, {"case_sensitive", "attribute"});
  const List items = items_of(call);
  const List keys = keys_of(call, items, bound.value_or(1, {}), bound.flag_or(0, false));
  List kept;
  for (size_t i = 0; i < items.size(); ++i) {
    const auto end = keys.begin() + static_cast<int64_t>(i);
    call.run.charge(i);
    if (std::none_of(keys.begin(), end, [&](const Value& key) { return equal(key, keys[i]); }))
      kept.push_back(items[i]);
  }
  return generator(std::move(kept));
}

Value extreme(const Call& call, bool largest) {
  const Bound bound(call, {"case_sensitive", "attribute"});
  const List items = items_of(call);
  if (items.empty()) return Value::undefined("the item of an empty list");
  const List keys = keys_of(call, items, bound.value_or(1, {}), bound.flag_or(0, false));
  size_t best = 0;
  for (size_t i = 1; i < items.size(); ++i) {
    const int order = compare(keys[i], keys[best]);
    if (largest ? order > 0 : order < 0) best = i;
  }
  return items[best];
}

Value filter_min(const Call& call) { return extreme(call, false); }
Value filter_max(const Call& call) { return extreme(call, true); }

Value filter_sum(const Call& call) {
  const Bound bound(call, {"attribute", "start"});
  Value sum = bound.value_or(1, int64_t{0});
  for (const Value& item : items_of(call))
    sum = call.run.binary("+", sum, attribute_by_path(call, item, bound.value_or(0, {})));
  return sum;
}

Value filter_batch(const Call& call) {
  const Bound bound(call, {"linecount", "fill_with"});
  const int64_t size = bound.integer_or(0, 0);
  if (size < 1) throw Failure{fmt::format("'linecount' of batch() is {}, must be positive", size)};
  List batches, row;
  for (const Value& item : items_of(call)) {
    row.push_back(item);
    if (row.size() == static_cast<size_t>(size)) batches.emplace_back(std::exchange(row, {}));
  }
  if (!row.empty()) {
    const Value fill = bound.value_or(1, {});
    while (!fill.is_none() && row.size() < static_cast<size_t>(size)) {
      call.run.charge(1);
      row.push_back(fill);
    }
    batches.emplace_back(std::move(row));
  }
  return generator(std::move(batches));
}

constexpr Builtin kFilters[] = {
    {"batch", filter_batch},     {"dictsort", filter_dictsort}, {"first", filter_first},
    {"items", filter_items},     {"join", filter_join},         {"last", filter_last},
    {"list", filter_list},       {"map", filter_map},           {"max", filter_max},
    {"min", filter_min},         {"reject", filter_reject},     {"rejectattr", filter_rejectattr},
    {"reverse", filter_reverse}, {"select", filter_select},     {"selectattr", filter_selectattr},
    {"sort", filter_sort},       {"sum", filter_sum},           {"unique", filter_unique}};

}  // namespace

Value joined(const Call& call, std::string_view separator, const List& items) {
  size_t bytes = 0;
  for (const Value& item : items) {
    if (item.text() == nullptr)
      throw Failure{fmt::format("{}() needs texts, not a {}", call.name, item.type_name())};
    bytes += item.text()->size() + separator.size();
  }
  call.run.charge_bytes(bytes);
  std::string text;
  for (size_t i = 0; i < items.size(); ++i) {
    if (i > 0) text += separator;
    text += *items[i].text();
  }
  return text;
}

const Builtin* find_sequence_filter(std::string_view name) {
  const auto found = std::ranges::find(kFilters, name, &Builtin::name);
  return found == std::end(kFilters) ? nullptr : found;
}

}  // namespace fovea::jinja
