// SPDX-License-Identifier: Apache-2.0
// Reads config.json field by field. Errors name the field, its allowed range and its value.
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace fovea {

struct JsonLimits;

// A JSON object of a config or another file of a checkpoint. Accessors throw Error{corrupt_file}
// for missing, null or out-of-range values, with the path of the field ("rope_parameters.factor"),
// its value and the limit.
class JsonObject {
 public:
  static JsonObject open(const std::string& path);
  static JsonObject parse(std::string_view text, std::string_view name);
  static JsonObject parse(std::string_view text, std::string_view name, const JsonLimits& limits);
  static JsonObject of(std::shared_ptr<const nlohmann::json> document, std::string_view name);

  bool has(std::string_view field) const;       // true if present and not null
  bool contains(std::string_view field) const;  // true if present, even as null
  bool is_object(std::string_view field) const;
  int64_t integer(std::string_view field, int64_t low, int64_t high) const;
  int64_t integer_or(std::string_view field, int64_t fallback, int64_t low, int64_t high) const;
  double number(std::string_view field, double low, double high) const;
  double number_or(std::string_view field, double fallback, double low, double high) const;
  bool boolean_or(std::string_view field, bool fallback) const;
  std::string text(std::string_view field) const;
  std::string text_or(std::string_view field, std::string_view fallback) const;
  std::vector<std::string> texts(std::string_view field) const;
  std::vector<int64_t> integers(std::string_view field, int64_t low, int64_t high) const;
  std::vector<double> numbers(std::string_view field, double low, double high) const;
  JsonObject object(std::string_view field) const;
  std::vector<JsonObject> objects(std::string_view field) const;  // the field is an array
  std::vector<std::string> fields() const;                        // names in this object
  // Returns a non-null value of any type, for types that no accessor above covers.
  const nlohmann::json& value(std::string_view field) const;
  // Throws Error{corrupt_file} for a field whose value, or absence, contradicts other fields.
  [[noreturn]] void refuse(std::string_view field, std::string_view wanted) const;
  // Reads an integer or a list of integers (eos_token_id).
  std::vector<int64_t> integer_or_list(std::string_view field, int64_t low, int64_t high) const;

 private:
  struct Node;
  JsonObject child(const nlohmann::json& object, std::string_view field) const;

  std::shared_ptr<const Node> node_;
};

}  // namespace fovea
