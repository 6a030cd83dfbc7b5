// SPDX-License-Identifier: Apache-2.0
// How C functions fail: inside they throw, at their border guarded() makes a status of it.
#pragma once

#include <fmt/core.h>

#include <cstdint>
#include <string_view>
#include <type_traits>
#include <utility>

#include "fovea/c/base.h"
#include "fovea/error.h"

namespace fovea::c {

// Throws Error{invalid_argument} with the composed message.
template <typename... Args>
[[noreturn]] void refuse(fmt::format_string<Args...> format, Args&&... args) {
  throw Error(ErrorCode::invalid_argument, fmt::format(format, std::forward<Args>(args)...));
}

// Throws Error{invalid_argument} with the composed message if the condition is false.
template <typename... Args>
void check(bool condition, fmt::format_string<Args...> format, Args&&... args) {
  if (!condition) refuse(format, std::forward<Args>(args)...);
}

// Sets the message of this thread and returns `status`. Does not throw.
fovea_status failed(fovea_status status, std::string_view message) noexcept;

// Returns the status of the exception that is being handled, and sets its message.
fovea_status status_of_exception() noexcept;

// Runs the body of a C function, which returns a status or nothing, and catches what it throws.
template <typename Body>
fovea_status guarded(Body&& body) noexcept {
  try {
    if constexpr (std::is_same_v<std::invoke_result_t<Body>, fovea_status>) {
      return body();
    } else {
      body();
      return FOVEA_OK;
    }
  } catch (...) {
    return status_of_exception();
  }
}

}  // namespace fovea::c
