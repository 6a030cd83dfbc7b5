// SPDX-License-Identifier: Apache-2.0
#include "tokenizer/tool_values.h"

#include <algorithm>
#include <cctype>
#include <nlohmann/json.hpp>

namespace fovea {
namespace {

using Json = nlohmann::ordered_json;

Json parsed(std::string_view text) { return Json::parse(text, nullptr, false); }

// Returns true if the schema's `type` is the name or has it in a list.
bool allows(const Json& schema, std::string_view type) {
  if (!schema.is_object() || !schema.contains("type")) return false;
  const Json name(type);
  const Json& types = schema["type"];
  return types == name || (types.is_array() && std::ranges::find(types, name) != types.end());
}

// Returns the value of an argument that has no quotes.
Json value_of(std::string_view text, const Json& schema) {
  const std::string_view word = trimmed(text);
  const bool is_null = word == "null" || word == "None";
  if (allows(schema, "string") && !(is_null && allows(schema, "null"))) return text;
  if (is_null) return nullptr;
  // Templates may write them as Python does.
  if (word == "True" || word == "False") return word == "True";
  const bool nested = word.starts_with('{') || word.starts_with('[');
  if (nested && json_end(word) != word.size()) return text;
  Json value = parsed(word);
  return value.is_discarded() ? Json(text) : value;
}

// Collects the arguments of one call.
class Arguments {
 public:
  Arguments(const std::string& function, const ParameterSchemas& schemas) {
    const auto found = schemas.find(function);
    if (found == schemas.end()) return;
    const Json schema = parsed(found->second);
    if (schema.is_object() && schema.contains("properties")) properties_ = schema["properties"];
  }
  void add(const std::string& key, std::string_view text) {
    const bool known = properties_.is_object() && properties_.contains(key);
    all_[key] = value_of(text, known ? properties_[key] : Json());
  }
  std::string json() const { return all_.dump(-1, ' ', false, Json::error_handler_t::replace); }

 private:
  Json properties_;
  Json all_ = Json::object();
};

// Removes text up to a mark, and the mark, and returns the text. Returns nothing if there is no
// mark.
std::optional<std::string_view> take_until(std::string_view& text, std::string_view mark) {
  const size_t at = text.find(mark);
  if (at == text.npos) return std::nullopt;
  const std::string_view before = text.substr(0, at);
  text.remove_prefix(at + mark.size());
  return before;
}

bool is_name(std::string_view text) {
  return !text.empty() && std::ranges::all_of(text, [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) != 0 ||
           std::string_view("_-.:/").find(c) != std::string_view::npos;
  });
}

bool skip(std::string_view& text, std::string_view mark) {
  if (!text.starts_with(mark)) return false;
  text.remove_prefix(mark.size());
  return true;
}

}  // namespace

std::string_view trimmed(std::string_view text) {
  const size_t begin = text.find_first_not_of(kSpace);
  if (begin == text.npos) return {};
  return text.substr(begin, text.find_last_not_of(kSpace) + 1 - begin);
}

size_t json_end(std::string_view text) {
  int depth = 0;
  bool quoted = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char byte = text[i];
    if (quoted) {
      if (byte == '\\') ++i;
      quoted = byte != '"';
    } else if (byte == '"') {
      quoted = true;
    } else if (byte == '{' || byte == '[') {
      if (++depth > kMaxValueDepth) return text.npos;
    } else if (byte == '}' || byte == ']') {
      if (--depth == 0) return i + 1;
    }
    if (depth == 0) return text.npos;
  }
  return 0;
}

ParameterSchemas parameter_schemas(std::string_view tools) {
  ParameterSchemas schemas;
  const Json list = parsed(tools);
  if (!list.is_array()) return schemas;
  for (const Json& tool : list) {
    const Json function = tool.is_object() ? tool.value("function", Json()) : Json();
    if (!function.is_object() || !function.contains("parameters")) continue;
    if (const Json name = function.value("name", Json()); name.is_string())
      schemas[name.get<std::string>()] =
          function["parameters"].dump(-1, ' ', false, Json::error_handler_t::replace);
  }
  return schemas;
}

std::optional<ToolCall> read_qwen3_coder_call(std::string_view text,
                                              const ParameterSchemas& schemas) {
  if (!skip(text, "<function=")) return std::nullopt;
  const auto name = take_until(text, ">");
  if (!name || !is_name(trimmed(*name))) return std::nullopt;
  ToolCall call{std::string(trimmed(*name)), {}};
  Arguments arguments(call.name, schemas);
  for (text = trimmed(text); skip(text, "<parameter="); text = trimmed(text)) {
    const auto key = take_until(text, ">");
    if (!key) return std::nullopt;
    std::optional<std::string_view> value = take_until(text, "</parameter>");
    if (!value) {
      value = text.substr(0, text.find("</function>"));
      text.remove_prefix(value->size());
    }
    // The marks stand on lines of their own.
    if (value->starts_with('\n')) value->remove_prefix(1);
    if (value->ends_with('\n')) value->remove_suffix(1);
    arguments.add(std::string(*key), *value);
  }
  skip(text, "</function>");
  if (!trimmed(text).empty()) return std::nullopt;
  call.arguments = arguments.json();
  return call;
}

std::optional<ToolCall> read_glm4_call(std::string_view text, const ParameterSchemas& schemas) {
  const size_t end = std::min(text.find("<arg_key>"), text.size());
  ToolCall call{std::string(trimmed(text.substr(0, end))), {}};
  if (!is_name(call.name)) return std::nullopt;
  text.remove_prefix(end);
  Arguments arguments(call.name, schemas);
  for (; skip(text, "<arg_key>"); text = trimmed(text)) {
    const auto key = take_until(text, "</arg_key>");
    text = trimmed(text);
    if (!key || !skip(text, "<arg_value>")) return std::nullopt;
    const auto value = take_until(text, "</arg_value>");
    if (!value) return std::nullopt;
    arguments.add(std::string(trimmed(*key)), *value);
  }
  if (!text.empty()) return std::nullopt;
  call.arguments = arguments.json();
  return call;
}

}  // namespace fovea
