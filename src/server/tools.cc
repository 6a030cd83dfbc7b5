// SPDX-License-Identifier: Apache-2.0
#include "server/tools.h"

#include <fmt/format.h>

#include <optional>

#include "fovea/error.h"
#include "server/api_error.h"
#include "server/json_text.h"

namespace fovea::server {
namespace {

using nlohmann::json;
using Ordered = nlohmann::ordered_json;

constexpr size_t kMaxTools = 1024, kMaxNameBytes = 256;

void check_tool(const json& tool, const std::string& param) {
  if (!tool.is_object()) refuse(param, "{} is {}, must be an object", param, shown(tool));
  Fields fields(tool, param + ".");
  if (fields.text("type", 64).value_or("function") != "function") {
    refuse(fields.path("type"), "{} must be function", fields.path("type"));
  }
  const std::string place = fields.path("function");
  const json* const given = fields.find("function");
  if (given == nullptr || !given->is_object()) {
    refuse(place, "{} is {}, must be an object", place,
           given == nullptr ? "missing" : shown(*given));
  }
  Fields function(*given, place + ".");
  if (function.text("name", kMaxNameBytes).value_or("").empty()) {
    refuse(function.path("name"), "{} is missing", function.path("name"));
  }
  const json* const parameters = function.find("parameters");
  if (parameters != nullptr && !parameters->is_object()) {
    refuse(function.path("parameters"), "{} is {}, must be an object", function.path("parameters"),
           shown(*parameters));
  }
}

// A function without parameters takes an object without members; {} stands for any object.
Ordered parameters_of(const Ordered& function) {
  const auto found = function.find("parameters");
  if (found == function.end() || found->is_null()) {
    return {{"type", "object"}, {"properties", Ordered::object()}};
  }
  return found->empty() ? Ordered{{"type", "object"}} : *found;
}

// Makes references to places of a schema point to their new places below `prefix`.
void move_references(Ordered& schema, const std::string& prefix) {
  if (!schema.is_structured()) return;
  for (auto& [key, value] : schema.items()) {
    if (key == "const" || key == "enum" || key == "default" || key == "examples") continue;
    if (key == "$ref" && value.is_string() && value.get_ref<const std::string&>().starts_with('#'))
      value = "#" + prefix + value.get<std::string>().substr(1);
    else
      move_references(value, prefix);
  }
}

// Returns the schema of a list of calls of any of the tools.
Ordered calls_schema(const Ordered& tools, bool several) {
  Ordered calls = Ordered::array();
  for (const Ordered& tool : tools) {
    const Ordered& function = tool.at("function");
    Ordered parameters = parameters_of(function);
    move_references(parameters, fmt::format("/items/anyOf/{}/properties/arguments", calls.size()));
    Ordered name = Ordered::object();
    name["const"] = function.at("name");
    Ordered call = {{"type", "object"}};
    call["properties"]["name"] = std::move(name);
    call["properties"]["arguments"] = std::move(parameters);
    call["required"] = {"name", "arguments"};
    calls.push_back(std::move(call));
  }
  Ordered schema = {{"type", "array"}, {"minItems", 1}};
  if (!several) schema["maxItems"] = 1;
  schema["items"]["anyOf"] = std::move(calls);
  return schema;
}

const Ordered* function_named(const Ordered& tools, const std::string& name) {
  for (const Ordered& tool : tools) {
    const Ordered& function = tool.at("function");
    if (function.at("name") == name) return &function;
  }
  return nullptr;
}

// Reads tool_choice: "none", "auto", "required", or the name of a function.
ToolUse read_choice(Fields& body, bool has_tools, std::string& function) {
  const json* const given = body.find("tool_choice");
  if (given == nullptr) return has_tools ? ToolUse::automatic : ToolUse::none;
  if (given->is_object()) {
    Fields choice(*given, "tool_choice.");
    const json* const named = choice.find("function");
    if (choice.text("type", 64) != "function" || named == nullptr || !named->is_object()) {
      refuse("tool_choice",
             "tool_choice is an object, must name a function: "
             R"({{"type": "function", "function": {{"name": ...}}}})");
    }
    function = Fields(*named, "tool_choice.function.").text("name", kMaxNameBytes).value_or("");
    return ToolUse::function;
  }
  if (*given == "none") return ToolUse::none;
  if (*given == "auto") return has_tools ? ToolUse::automatic : ToolUse::none;
  if (*given == "required") return ToolUse::required;
  refuse("tool_choice", "tool_choice is {}, must be none, auto, required or a function",
         shown(*given));
}

void check_schema(const std::string& schema, const Engine& engine) {
  try {
    engine.check({.tokens = {0}, .sampling = {.json_schema = schema}});
  } catch (const Error& error) {
    refuse("tools", "the parameters of a function cannot be enforced: {}", error.what());
  }
}

}  // namespace

std::string read_tool_list(Fields& body) {
  const json* const list = body.find("tools");
  if (list == nullptr) return {};
  if (!list->is_array()) refuse("tools", "tools is {}, must be an array", shown(*list));
  if (list->size() > kMaxTools) {
    refuse("tools", "tools has {} entries, at most {}", list->size(), kMaxTools);
  }
  for (size_t i = 0; i < list->size(); ++i) check_tool((*list)[i], fmt::format("tools[{}]", i));
  return list->empty() ? std::string() : json_text(body.ordered("tools"));
}

ToolChoice read_tools(Fields& body, const Engine& engine) {
  ToolChoice choice;
  choice.tools = read_tool_list(body);
  choice.several = body.boolean("parallel_tool_calls").value_or(true);
  choice.use = read_choice(body, !choice.tools.empty(), choice.function);
  if (choice.use == ToolUse::none) {
    choice.tools.clear();  // the model does not hear of tools that it must not call
    return choice;
  }
  if (choice.use == ToolUse::automatic) {
    choice.format = engine.tool_call_format();
    if (choice.format == ToolCallFormat::none) {
      refuse("tools",
             "the model's chat template writes calls of tools in no format that this server reads; "
             "tool_choice can be required or a function");
    }
    return choice;
  }
  if (choice.tools.empty()) {
    refuse("tool_choice", "tool_choice wants a call, but tools is missing or empty");
  }
  const Ordered& tools = body.ordered("tools");
  if (choice.use == ToolUse::required) {
    choice.schema = json_text(calls_schema(tools, choice.several));
  } else {
    const Ordered* const function = function_named(tools, choice.function);
    if (function == nullptr) refuse("tool_choice", "tool_choice names a function not in tools");
    choice.schema = json_text(parameters_of(*function));
  }
  check_schema(choice.schema, engine);
  return choice;
}

}  // namespace fovea::server
