// SPDX-License-Identifier: Apache-2.0
// config.json, read field by field: every access names the field, its range and what was found.
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace fovea {

struct JsonLimits;

// A JSON object of a config. Missing, null or out-of-range values throw Error{corrupt_file} with
// the path of the field ("rope_parameters.factor"), its value and the limit.
class Config {
 public:
  static Config open(const std::string& path);
  static Config parse(std::string_view text, std::string_view name);
  static Config parse(std::string_view text, std::string_view name, const JsonLimits& limits);
  static Config of(std::shared_ptr<const nlohmann::json> document, std::string_view name);

  bool has(std::string_view field) const;       // present and not null
  bool contains(std::string_view field) const;  // present, if only as null
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
  Config object(std::string_view field) const;
  std::vector<Config> objects(std::string_view field) const;  // of an array
  std::vector<std::string> fields() const;                    // the names in this object
  // A value of any type but null, for types that no accessor above covers.
  const nlohmann::json& value(std::string_view field) const;
  // Throws the error above for a field whose value, or absence, does not fit others.
  [[noreturn]] void refuse(std::string_view field, std::string_view wanted) const;
  // An integer or a list of them (eos_token_id).
  std::vector<int64_t> integer_or_list(std::string_view field, int64_t low, int64_t high) const;

 private:
  struct Node;
  Config child(const nlohmann::json& object, std::string_view field) const;

  std::shared_ptr<const Node> node_;
};

}  // namespace fovea
