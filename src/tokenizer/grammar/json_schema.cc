// SPDX-License-Identifier: Apache-2.0
#include "tokenizer/grammar/json_schema.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "core/check.h"
#include "core/quote.h"
#include "model/json.h"
#include "tokenizer/grammar/schema_problem.h"

namespace fovea::grammar {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::string_view kAnnotations[] = {
    "title",   "description", "default",  "examples", "deprecated",  "readOnly", "writeOnly",
    "$schema", "$id",         "$comment", "$defs",    "definitions", "format"};
constexpr std::string_view kTypes[] = {"object",  "array",   "string", "number",
                                       "integer", "boolean", "null"};
// Keywords that tell the type of a schema without "type".
constexpr std::pair<std::string_view, std::string_view> kImplied[] = {
    {"properties", "object"}, {"required", "object"},          {"additionalProperties", "object"},
    {"items", "array"},       {"minItems", "array"},           {"maxItems", "array"},
    {"minLength", "string"},  {"maxLength", "string"},         {"minimum", "integer"},
    {"maximum", "integer"},   {"exclusiveMinimum", "integer"}, {"exclusiveMaximum", "integer"}};

constexpr int64_t kMaxInteger = 999'999'999'999'999'999;

// Returns the number of a keyword in [0, limit], or nullopt if it is absent.
std::optional<int64_t> count_of(const Json& schema, const char* keyword, const std::string& place) {
  const auto found = schema.find(keyword);
  if (found == schema.end()) return std::nullopt;
  constexpr int64_t kMax = 1'000'000;
  if (!found->is_number() || *found < 0 || *found > kMax ||
      std::floor(found->get<double>()) != found->get<double>())
    refuse(place, "'{}' is {}, must be an integer in [0, {}]", keyword, found->dump(), kMax);
  return static_cast<int64_t>(found->get<double>());
}

// Returns the bound of integers that a keyword gives, rounded towards the allowed side.
std::optional<int64_t> bound_of(const Json& schema, const char* keyword, bool lower,
                                const std::string& place) {
  const auto found = schema.find(keyword);
  if (found == schema.end()) return std::nullopt;
  if (!found->is_number()) refuse(place, "'{}' is {}, must be a number", keyword, found->dump());
  const bool exclusive = std::string_view(keyword).starts_with("exclusive");
  const double number = found->get<double>();
  if (std::abs(number) > static_cast<double>(kMaxInteger))
    return number < 0 ? -kMaxInteger : kMaxInteger;
  if (found->is_number_integer()) return found->get<int64_t>() + (exclusive ? lower ? 1 : -1 : 0);
  const double whole = lower ? std::ceil(number) : std::floor(number);
  const bool on_bound = exclusive && whole == number;
  return static_cast<int64_t>(whole) + (on_bound ? lower ? 1 : -1 : 0);
}

}  // namespace

int32_t SchemaCompiler::compile(std::string_view schema, Automaton& automaton) {
  check_argument(schema.size() <= kMaxBytes, "json_schema has {} bytes, the limit is {}",
                 schema.size(), kMaxBytes);
  // Checks the depth and repeated keys, which the parser of ordered documents does not.
  try {
    (void)parse_json(schema, "json_schema", {.bytes = kMaxBytes, .depth = kMaxDepth});
  } catch (const Error& error) {
    fail(ErrorCode::invalid_argument, "{}", error.what());
  }
  const Json root = Json::parse(schema);
  SchemaCompiler compiler(root, automaton);
  const int32_t first = compiler.schema(root, "json_schema", automaton.end());
  automaton.prune();
  return first;
}

void SchemaCompiler::check_keywords(const Json& schema,
                                    const std::vector<std::string_view>& allowed,
                                    const std::string& place) const {
  for (const auto& [keyword, value] : schema.items()) {
    if (std::ranges::find(kAnnotations, keyword) != std::end(kAnnotations)) continue;
    if (std::ranges::find(allowed, keyword) != allowed.end()) continue;
    refuse(place, "the keyword {} is not supported here; supported: {}", quote(keyword),
           fmt::join(allowed, ", "));
  }
}

int32_t SchemaCompiler::schema(const Json& schema, const std::string& place, int32_t next) {
  if (depth_ >= kMaxDepth) refuse(place, "nested deeper than {}", kMaxDepth);
  ++depth_;
  const auto finish = [&](int32_t node) {
    --depth_;
    return node;
  };
  if (schema.is_boolean())
    return finish(schema.get<bool>() ? parts_.value(next) : automaton_.dead());
  if (!schema.is_object())
    refuse(place, "the schema is {}, must be an object or a boolean", schema.type_name());
  if (schema.contains("$ref")) return finish(reference(schema, place, next));
  for (const char* keyword : {"anyOf", "oneOf", "allOf"})
    if (schema.contains(keyword)) return finish(choices(schema, keyword, place, next));
  if (schema.contains("enum") || schema.contains("const"))
    return finish(constants(schema, place, next));
  const std::vector<std::string> types = types_of(schema, place);
  if (types.empty()) {
    check_keywords(schema, {"type"}, place);
    return finish(parts_.value(next));
  }
  std::vector<int32_t> nodes;
  for (const std::string& type : types) nodes.push_back(typed(schema, type, place, next));
  return finish(nodes.size() == 1 ? nodes[0] : automaton_.any_of(std::move(nodes)));
}

std::vector<std::string> SchemaCompiler::types_of(const Json& schema,
                                                  const std::string& place) const {
  const auto found = schema.find("type");
  std::vector<std::string> types;
  if (found == schema.end()) {
    for (const auto& [keyword, type] : kImplied)
      if (types.empty() && schema.contains(keyword)) types.emplace_back(type);
    return types;
  }
  const Json list = found->is_array() ? *found : Json::array({*found});
  if (list.empty()) refuse(place, "'type' is empty");
  for (const Json& type : list) {
    if (!type.is_string() || std::ranges::find(kTypes, type.get<std::string>()) == std::end(kTypes))
      refuse(place, "'type' has {}, must be one of {}", type.dump(), fmt::join(kTypes, ", "));
    types.push_back(type.get<std::string>());
  }
  return types;
}

int32_t SchemaCompiler::typed(const Json& schema, const std::string& type, const std::string& place,
                              int32_t next) {
  // With several types, the keywords of the others are allowed, too.
  std::vector<std::string_view> allowed = {"type"};
  const std::vector<std::string> types = types_of(schema, place);
  for (const auto& [keyword, of] : kImplied) {
    const bool integer = of == "integer" && std::ranges::find(types, "number") == types.end();
    if ((of != "integer" || integer) && std::ranges::find(types, of) != types.end())
      allowed.push_back(keyword);
  }
  check_keywords(schema, allowed, place);
  if (type == "object") return object(schema, place, next);
  if (type == "array") return array(schema, place, next);
  if (type == "string") return string(schema, place, next);
  if (type == "integer") return integer(schema, place, next);
  if (type == "number") return parts_.number(next);
  if (type == "null") return parts_.literal("null", next);
  return automaton_.any_of({parts_.literal("true", next), parts_.literal("false", next)});
}

const Json& SchemaCompiler::resolved(const Json& schema, const std::string& place) const {
  const Json* found = &schema;
  for (int i = 0; found->is_object() && found->contains("$ref"); ++i) {
    const Json& given = found->at("$ref");
    if (!given.is_string()) refuse(place, "'$ref' is {}, must be a text", given.dump());
    const std::string pointer = given;
    if (i >= kMaxDepth) refuse(place, "'$ref' {} refers to itself", quote(pointer));
    if (!pointer.starts_with('#'))
      refuse(place, "'$ref' is {}, must begin with '#'; nothing is fetched", quote(pointer));
    try {
      found = &root_.at(Json::json_pointer(pointer.substr(1)));
    } catch (const nlohmann::json::exception&) {
      refuse(place, "'$ref' {} refers to nothing", quote(pointer));
    }
  }
  return *found;
}

int32_t SchemaCompiler::reference(const Json& schema, const std::string& place, int32_t next) {
  check_keywords(schema, {"$ref"}, place);
  const Json& target = resolved(schema, place);
  const std::string pointer = schema.at("$ref");
  if (const auto known = rules_.find(pointer); known != rules_.end())
    return automaton_.call(known->second, next, unfinished_.contains(pointer));
  const int32_t rule = automaton_.dead();
  rules_.emplace(pointer, rule);
  unfinished_.insert(pointer);
  const int depth = std::exchange(depth_, 0);
  if (rules_.size() > 1000) refuse(place, "more than 1000 references");
  const int32_t first = this->schema(target, pointer, automaton_.end());
  depth_ = depth;
  automaton_.set(rule, {.free = {first}});
  unfinished_.erase(pointer);
  return automaton_.call(rule, next);
}

int32_t SchemaCompiler::choices(const Json& schema, const char* keyword, const std::string& place,
                                int32_t next) {
  check_keywords(schema, {keyword}, place);
  const Json& list = schema.at(keyword);
  const std::string inside = place + "." + keyword;
  if (!list.is_array() || list.empty()) refuse(place, "'{}' must be a list with entries", keyword);
  if (std::string_view(keyword) == "allOf" && list.size() > 1)
    refuse(place, "'allOf' with {} entries is not supported, only with one", list.size());
  if (std::string_view(keyword) == "oneOf") check_disjoint(list, inside);
  std::vector<int32_t> nodes;
  for (size_t i = 0; i < list.size(); ++i)
    nodes.push_back(this->schema(list[i], fmt::format("{}[{}]", inside, i), next));
  return automaton_.any_of(std::move(nodes));
}

int32_t SchemaCompiler::constants(const Json& schema, const std::string& place, int32_t next) {
  check_keywords(schema, {"enum", "const", "type"}, place);
  if (schema.contains("enum") && !schema["enum"].is_array()) refuse(place, "'enum' must be a list");
  const Json given = schema.contains("enum") ? schema["enum"] : Json::array({schema["const"]});
  const std::vector<std::string> types = types_of(schema, place);
  std::vector<int32_t> nodes;
  for (const Json& value : given) {
    if (schema.contains("const") && value != schema["const"]) continue;
    const std::string type = type_of(value);
    const bool fits = types.empty() || std::ranges::find(types, type) != types.end() ||
                      (type == "integer" && std::ranges::find(types, "number") != types.end());
    if (fits) nodes.push_back(constant(value, next));
  }
  return automaton_.any_of(std::move(nodes));
}

// Adds one value, with space between its tokens.
int32_t SchemaCompiler::constant(const Json& value, int32_t next) {
  if (!value.is_structured()) return parts_.literal(value.dump(), next);
  const bool is_object = value.is_object();
  const uint8_t open = is_object ? '{' : '[', close = is_object ? '}' : ']';
  int32_t node = parts_.space(automaton_.bytes(close, close, next));
  for (auto member = value.rbegin(); member != value.rend(); ++member) {
    node = constant(*member, node);
    if (is_object) {
      const std::string name = Json(std::prev(member.base()).key()).dump();
      node = parts_.literal(name, automaton_.bytes(':', ':', parts_.space(node)));
    }
    node = parts_.space(node);
    if (std::next(member) != value.rend()) node = automaton_.bytes(',', ',', node);
  }
  return automaton_.bytes(open, open, node);
}

int32_t SchemaCompiler::object(const Json& schema, const std::string& place, int32_t next) {
  const bool any =
      !schema.contains("properties") && !schema.contains("required") &&
      (!schema.contains("additionalProperties") || schema["additionalProperties"] == true);
  if (any) return parts_.object(next);
  const int32_t close = automaton_.bytes('}', '}', next);
  return automaton_.bytes('{', '{', parts_.space(members(schema, place, close)));
}

// Adds the members in the order of `properties`, and then others. Two nodes stand before each
// place: the one of a member that is the first, and the one of a later member, after a comma.
int32_t SchemaCompiler::members(const Json& schema, const std::string& place, int32_t close) {
  const Json properties = schema.value("properties", Json::object());
  const Json required = schema.value("required", Json::array());
  if (!properties.is_object()) refuse(place, "'properties' must be an object");
  if (!required.is_array()) refuse(place, "'required' must be a list");
  std::vector<std::pair<std::string, const Json*>> names;
  for (const auto& [name, property] : properties.items()) names.emplace_back(name, &property);
  const bool has_others = schema.contains("additionalProperties");
  const Json others = has_others ? schema["additionalProperties"] : Json(false);
  for (const Json& name : required) {
    if (!name.is_string()) refuse(place, "'required' has {}, must be texts", name.dump());
    // Without a schema of its own it follows that of other properties; any value unless given.
    if (!properties.contains(name.get<std::string>()) && others == false && has_others)
      refuse(place, "'required' has {}, which no property allows", quote(name.get<std::string>()));
    const bool is_new = std::ranges::none_of(
        names, [&](const auto& known) { return known.first == name.get<std::string>(); });
    if (is_new) {
      static const Json kAny = true;
      names.emplace_back(name.get<std::string>(),
                         has_others ? &schema["additionalProperties"] : &kAny);
    }
  }
  const auto comma = [&](int32_t member) {
    return automaton_.bytes(',', ',', parts_.space(member));
  };
  const auto value = [&](const Json& of, const std::string& name, int32_t after) {
    return automaton_.bytes(':', ':', parts_.space(this->schema(of, place + "." + name, after)));
  };
  // After the last member; `first` has no comma before it.
  int32_t later = parts_.space(close), first = close;
  if (others != false) {
    std::vector<std::string> known;
    for (const auto& [name, unused] : names) known.push_back(name);
    const int32_t after = automaton_.dead();
    const int32_t member = parts_.other_string(known, value(others, "additionalProperties", after));
    automaton_.set(after, {.free = {later, comma(member)}});
    later = after;
    first = automaton_.any_of({close, member});
  }
  for (auto entry = names.rbegin(); entry != names.rend(); ++entry) {
    const auto& [name, property] = *entry;
    const int32_t member = parts_.literal(Json(name).dump(), value(*property, name, later));
    const bool must = std::ranges::find(required, Json(name)) != required.end();
    const int32_t with_comma = comma(member);
    later = must ? with_comma : automaton_.any_of({with_comma, later});
    first = must ? member : automaton_.any_of({member, first});
  }
  return first;
}

int32_t SchemaCompiler::array(const Json& schema, const std::string& place, int32_t next) {
  const int64_t min_items = count_of(schema, "minItems", place).value_or(0);
  const std::optional<int64_t> max_items = count_of(schema, "maxItems", place);
  const Json items = schema.value("items", Json(true));
  if (max_items && *max_items < min_items)
    refuse(place, "'maxItems' is {}, less than 'minItems', {}", *max_items, min_items);
  if (min_items == 0 && !max_items && items == true) return parts_.array(next);
  const int32_t close = automaton_.bytes(']', ']', next), end = parts_.space(close);
  if (max_items == 0) return automaton_.bytes('[', '[', end);
  const int32_t rule = automaton_.dead();
  automaton_.set(rule, {.free = {this->schema(items, place + ".items", automaton_.end())}});
  const auto comma = [&](int32_t after) {
    return automaton_.bytes(',', ',', parts_.space(automaton_.call(rule, after)));
  };
  // The node after item number `counted`, from the last to the first.
  int32_t after = automaton_.dead();
  const int64_t counted = max_items.value_or(std::max<int64_t>(min_items, 1));
  automaton_.set(after, max_items ? Node{.free = {end}} : Node{.free = {end, comma(after)}});
  for (int64_t done = counted - 1; done >= 1; --done) {
    std::vector<int32_t> nodes = {comma(after)};
    if (done >= min_items) nodes.push_back(end);
    after = automaton_.any_of(std::move(nodes));
  }
  std::vector<int32_t> nodes = {automaton_.call(rule, after)};
  if (min_items == 0) nodes.push_back(close);
  return automaton_.bytes('[', '[', parts_.space(automaton_.any_of(std::move(nodes))));
}

int32_t SchemaCompiler::string(const Json& schema, const std::string& place, int32_t next) {
  const int64_t min_length = count_of(schema, "minLength", place).value_or(0);
  const std::optional<int64_t> max_length = count_of(schema, "maxLength", place);
  if (max_length && *max_length < min_length)
    refuse(place, "'maxLength' is {}, less than 'minLength', {}", *max_length, min_length);
  return parts_.string(min_length, max_length, next);
}

int32_t SchemaCompiler::integer(const Json& schema, const std::string& place, int32_t next) {
  std::optional<int64_t> low, high;
  for (const char* keyword : {"minimum", "exclusiveMinimum"}) {
    if (const auto bound = bound_of(schema, keyword, true, place))
      low = std::max(low.value_or(-kMaxInteger), *bound);
  }
  for (const char* keyword : {"maximum", "exclusiveMaximum"}) {
    if (const auto bound = bound_of(schema, keyword, false, place))
      high = std::min(high.value_or(kMaxInteger), *bound);
  }
  if (!low && !high) return parts_.integer(next);
  if (low.value_or(-kMaxInteger) > high.value_or(kMaxInteger))
    refuse(place, "no integer is between {} and {}", *low, *high);
  return parts_.integer(low.value_or(-kMaxInteger), high.value_or(kMaxInteger), next);
}

}  // namespace fovea::grammar
