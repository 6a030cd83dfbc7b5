// SPDX-License-Identifier: Apache-2.0
// Parts that the files of the schema compiler share.
#pragma once

#include <fmt/format.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "core/check.h"

namespace fovea::grammar {

// Throws Error{invalid_argument} with the place in the schema and the problem.
template <typename... Args>
[[noreturn]] void refuse(const std::string& place, fmt::format_string<Args...> format,
                         Args&&... args) {
  fail(ErrorCode::invalid_argument, "{}: {}", place,
       fmt::format(format, std::forward<Args>(args)...));
}

// Returns the type of a value as schemas call it.
inline std::string type_of(const nlohmann::ordered_json& value) {
  if (value.is_number()) {
    const bool whole = value.is_number_integer() || std::floor(value.get<double>()) == value;
    return whole ? "integer" : "number";
  }
  return value.is_null() ? "null" : value.is_boolean() ? "boolean" : value.type_name();
}

}  // namespace fovea::grammar
