// SPDX-License-Identifier: Apache-2.0
// Parses JSON files of checkpoints under limits. All problems are Error{corrupt_file}.
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
  int depth = 64;  // nesting of objects and arrays
};

// Returns the parsed text. Errors give `name` and the byte. An object with repeated keys is an
// error. Throws std::bad_alloc if memory runs out; destroying the document allocates nothing.
std::shared_ptr<const nlohmann::json> parse_json(std::string_view text, std::string_view name,
                                                 JsonLimits limits);

// Returns an empty document. Destroying it allocates nothing.
std::shared_ptr<nlohmann::json> make_json_document();

// Throws if the text is too long or contains a NUL.
void check_json_text(std::string_view text, std::string_view name, size_t max_bytes);

// Returns the message of nlohmann-json without its prefix, cut to a readable length.
std::string json_problem(const nlohmann::json::exception& error);

// Describes a value for an error message: the literal, or "an object", "an array of 3".
std::string json_shown(const nlohmann::json& value);

}  // namespace fovea
