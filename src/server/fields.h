// SPDX-License-Identifier: Apache-2.0
// Reads the JSON objects of request bodies, field by field.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace fovea::server {

// Returns the JSON object of a body. Throws ApiError 400 if it is none, nested deeper than 64
// levels, not UTF-8, or has a key twice.
std::shared_ptr<const nlohmann::json> parse_body(std::string_view body);

// The fields of one object. A null counts as an absent field. Accessors throw ApiError 400 with the
// path of the field, and remember which fields the server knows.
class Fields {
 public:
  // `object` must be an object and outlive this. `path` is the prefix of its fields' paths.
  explicit Fields(const nlohmann::json& object, std::string path = {});
  // The whole body: `object` as parse_body() returns it for `source`, which must outlive this.
  static Fields of_body(const nlohmann::json& object, std::string_view source);

  // Returns null if the field is absent.
  const nlohmann::json* find(std::string_view name);
  std::optional<int64_t> integer(std::string_view name, int64_t low, int64_t high);
  std::optional<double> number(std::string_view name, double low, double high);
  std::optional<bool> boolean(std::string_view name);
  // Returns a text of up to `max_bytes`.
  std::optional<std::string> text(std::string_view name, size_t max_bytes);

  // Returns a field of the body, which must have it, with all members in the client's order. The
  // reference is valid as long as this. Refuses bodies with objects of more than 1024 members.
  const nlohmann::ordered_json& ordered(std::string_view name);

  std::string path(std::string_view name) const { return path_ + std::string(name); }
  // Names of the fields that no accessor has asked for.
  std::vector<std::string> unknown() const;

 private:
  const nlohmann::json& object_;
  std::string path_;
  std::string_view source_ = {};
  std::optional<nlohmann::ordered_json> ordered_ = {};  // the body, once a field of it is wanted
  std::set<std::string, std::less<>> known_;
};

// Reads an array of token ids below `vocabulary`. Throws ApiError 400 naming `param`.
std::vector<int32_t> read_tokens(const nlohmann::json& array, const std::string& param,
                                 int32_t vocabulary);

// Describes a value without its text: "a string", "an array of 3", "-5".
std::string shown(const nlohmann::json& value);

}  // namespace fovea::server
