// SPDX-License-Identifier: Apache-2.0
// JSON files of checkpoints, parsed under limits. Every problem is Error{corrupt_file}.
#pragma once

#include <cstddef>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "core/quote.h"

namespace fovea {

struct JsonLimits {
  size_t bytes = 10'000'000;
  int depth = 64;  // of nested objects and arrays
};

// The parsed text. Errors name `name` and the byte; repeated keys of one object are errors too.
// Where memory ends, std::bad_alloc leaves this function, and destroying the document allocates
// nothing.
std::shared_ptr<const nlohmann::json> parse_json(std::string_view text, std::string_view name,
                                                 JsonLimits limits);

// An empty document to be filled. Destroying it allocates nothing.
std::shared_ptr<nlohmann::json> make_json_document();

// Throws for text that is too long or holds a NUL.
void check_json_text(std::string_view text, std::string_view name, size_t max_bytes);

// The message of nlohmann-json without its prefix, at a readable length.
std::string json_problem(const nlohmann::json::exception& error);

// A value for an error message: the literal, or "an object", "an array of 3".
std::string json_shown(const nlohmann::json& value);

}  // namespace fovea
