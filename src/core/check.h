// SPDX-License-Identifier: Apache-2.0
// Argument checks that throw Error with a composed message.
#pragma once

#include <fmt/core.h>

#include <utility>

#include "fovea/error.h"

namespace fovea {

template <typename... Args>
[[noreturn]] void fail(ErrorCode code, fmt::format_string<Args...> format, Args&&... args) {
  throw Error(code, fmt::format(format, std::forward<Args>(args)...));
}

// check_argument(heads > 0, "q_heads is {}, must be positive", heads);
template <typename... Args>
void check_argument(bool condition, fmt::format_string<Args...> format, Args&&... args) {
  if (!condition) fail(ErrorCode::invalid_argument, format, std::forward<Args>(args)...);
}

}  // namespace fovea
