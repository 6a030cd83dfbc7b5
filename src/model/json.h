// SPDX-License-Identifier: Apache-2.0
// JSON files of checkpoints, parsed under limits. Every problem is Error{corrupt_file}.
#pragma once

#include <cstddef>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace fovea {

struct JsonLimits {
  size_t bytes = 10'000'000;
  int depth = 64;  // of nested objects and arrays
};

// The parsed text. Errors name `name` and the byte; repeated keys of one object are errors too.
nlohmann::json parse_json(std::string_view text, std::string_view name, JsonLimits limits);

// What nlohmann-json said, without its prefix and at a readable length.
std::string json_problem(const nlohmann::json::exception& error);

// A value for an error message: the literal, or "an object", "an array of 3".
std::string json_shown(const nlohmann::json& value);

// Text of a file for an error message: cut at a readable length, control characters as \x00.
std::string clipped(std::string_view text);

}  // namespace fovea
