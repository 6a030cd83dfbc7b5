// SPDX-License-Identifier: Apache-2.0
#include "server/fields.h"

#include <cmath>
#include <limits>

#include "fovea/error.h"
#include "model/json.h"
#include "server/api_error.h"

namespace fovea::server {
namespace {

using nlohmann::json;

// Bodies are limited before they are read.
constexpr JsonLimits kBodyLimits = {.bytes = std::numeric_limits<size_t>::max(), .depth = 64};
constexpr size_t kMaxOrderedMembers = 1024;

// Returns the value of a number without a fraction that fits 64 bits.
std::optional<int64_t> whole(const json& value) {
  if (value.is_number_unsigned() &&
      value.get<uint64_t>() > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
    return std::nullopt;
  }
  if (value.is_number_integer()) return value.get<int64_t>();
  if (!value.is_number_float()) return std::nullopt;
  const double number = value.get<double>();
  if (std::abs(number) >= 0x1p63 || number != std::floor(number)) return std::nullopt;
  return static_cast<int64_t>(number);
}

// Objects that keep their order search all members for each new one.
void check_members(const json& value, std::string_view field) {
  if (value.is_object() && value.size() > kMaxOrderedMembers) {
    refuse("", "an object has {} members, at most {} in a body with {}", value.size(),
           kMaxOrderedMembers, field);
  }
  if (!value.is_structured()) return;
  for (const json& part : value) check_members(part, field);
}

}  // namespace

std::shared_ptr<const json> parse_body(std::string_view body) {
  std::shared_ptr<const json> document;
  try {
    document = parse_json(body, "the body", kBodyLimits);
  } catch (const Error& error) {
    // The parser quotes the last bytes that it read.
    const std::string_view message = error.what();
    refuse("", "{}", message.substr(0, message.find("; last read")));
  }
  if (!document->is_object()) refuse("", "the body is {}, must be an object", shown(*document));
  return document;
}

Fields::Fields(const json& object, std::string path) : object_(object), path_(std::move(path)) {}

Fields Fields::of_body(const json& object, std::string_view source) {
  Fields body(object);
  body.source_ = source;
  return body;
}

const nlohmann::ordered_json& Fields::ordered(std::string_view name) {
  if (!ordered_) {
    check_members(object_, name);
    ordered_ = nlohmann::ordered_json::parse(source_);
  }
  return ordered_->at(std::string(name));
}

const json* Fields::find(std::string_view name) {
  known_.emplace(name);
  const auto found = object_.find(name);
  return found == object_.end() || found->is_null() ? nullptr : &*found;
}

std::optional<int64_t> Fields::integer(std::string_view name, int64_t low, int64_t high) {
  const json* const value = find(name);
  if (value == nullptr) return std::nullopt;
  const std::optional<int64_t> number = whole(*value);
  if (!number || *number < low || *number > high) {
    refuse(path(name), "{} is {}, must be an integer in [{}, {}]", path(name), shown(*value), low,
           high);
  }
  return number;
}

std::optional<double> Fields::number(std::string_view name, double low, double high) {
  const json* const value = find(name);
  if (value == nullptr) return std::nullopt;
  const double number = value->is_number() ? value->get<double>() : std::nan("");
  if (!(number >= low && number <= high)) {
    refuse(path(name), "{} is {}, must be a number in [{}, {}]", path(name), shown(*value), low,
           high);
  }
  return number;
}

std::optional<bool> Fields::boolean(std::string_view name) {
  const json* const value = find(name);
  if (value == nullptr) return std::nullopt;
  if (!value->is_boolean()) {
    refuse(path(name), "{} is {}, must be true or false", path(name), shown(*value));
  }
  return value->get<bool>();
}

std::optional<std::string> Fields::text(std::string_view name, size_t max_bytes) {
  const json* const value = find(name);
  if (value == nullptr) return std::nullopt;
  if (!value->is_string()) {
    refuse(path(name), "{} is {}, must be a string", path(name), shown(*value));
  }
  const auto& text = value->get_ref<const std::string&>();
  if (text.size() > max_bytes) {
    refuse(path(name), "{} has {} bytes, at most {}", path(name), text.size(), max_bytes);
  }
  return text;
}

std::vector<std::string> Fields::unknown() const {
  std::vector<std::string> names;
  for (const auto& [name, value] : object_.items()) {
    if (!known_.contains(name)) names.push_back(name);
  }
  return names;
}

std::vector<int32_t> read_tokens(const json& array, const std::string& param, int32_t vocabulary) {
  if (!array.is_array()) {
    refuse(param, "{} is {}, must be an array of token ids", param, shown(array));
  }
  std::vector<int32_t> tokens;
  tokens.reserve(array.size());
  for (const json& entry : array) {
    const std::optional<int64_t> token = whole(entry);
    if (!token || *token < 0 || *token >= vocabulary) {
      refuse(param, "{}[{}] is {}, must be a token id in [0, {})", param, tokens.size(),
             shown(entry), vocabulary);
    }
    tokens.push_back(static_cast<int32_t>(*token));
  }
  return tokens;
}

std::string shown(const json& value) {
  if (value.is_string()) return "a string";
  return json_shown(value);
}

}  // namespace fovea::server
