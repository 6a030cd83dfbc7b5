// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <map>
#include <set>

#include "tokenizer/grammar/json_schema.h"
#include "tokenizer/grammar/schema_problem.h"

namespace fovea::grammar {

// Refuses choices of oneOf of which one value may match two: their types must differ, or a required
// property must have different constants.
void SchemaCompiler::check_disjoint(const Json& choices, const std::string& place) const {
  struct Shape {
    std::set<std::string> types = {};
    std::map<std::string, std::set<std::string>> constants = {};  // by required property
  };
  std::vector<Shape> shapes;
  const auto values_of = [&](const Json& given) {
    const Json& schema = resolved(given, place);
    std::set<std::string> values;
    if (!schema.is_object()) return values;
    if (schema.contains("const")) values.insert(schema["const"].dump());
    if (!schema.contains("enum") || !schema["enum"].is_array()) return values;
    for (const Json& value : schema["enum"]) values.insert(value.dump());
    return values;
  };
  for (const Json& given : choices) {
    const Json& choice = resolved(given, place);
    Shape& shape = shapes.emplace_back();
    if (!choice.is_object()) continue;
    for (const std::string& type : types_of(choice, place))
      shape.types.insert(type == "integer" ? "number" : type);
    if (shape.types.empty() && !values_of(choice).empty()) {
      for (const char* keyword : {"const", "enum"}) {
        if (!choice.contains(keyword)) continue;
        const Json values = choice[keyword].is_array() ? choice[keyword] : Json{choice[keyword]};
        for (const Json& value : values)
          shape.types.insert(type_of(value) == "integer" ? "number" : type_of(value));
      }
    }
    if (!choice.contains("required") || !choice.contains("properties")) continue;
    for (const Json& name : choice["required"]) {
      if (name.is_string() && choice["properties"].contains(name.get<std::string>()))
        shape.constants[name.get<std::string>()] =
            values_of(choice["properties"][name.get<std::string>()]);
    }
  }
  const auto apart = [](const auto& left, const auto& right) {
    return !left.empty() && !right.empty() &&
           std::ranges::none_of(left, [&](const auto& value) { return right.contains(value); });
  };
  for (size_t i = 0; i < shapes.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      if (apart(shapes[i].types, shapes[j].types)) continue;
      const bool told_apart = std::ranges::any_of(shapes[i].constants, [&](const auto& property) {
        const auto other = shapes[j].constants.find(property.first);
        return other != shapes[j].constants.end() && apart(property.second, other->second);
      });
      if (!told_apart) {
        refuse(place,
               "entries {} and {} may allow the same value; use anyOf, different types, or "
               "a required property with different constants",
               j, i);
      }
    }
  }
}

}  // namespace fovea::grammar
