// SPDX-License-Identifier: Apache-2.0
// Argument checks that throw Error with a composed message.
#pragma once

#include <fmt/core.h>

#include <cstdint>
#include <string_view>
#include <utility>

#include "fovea/error.h"

namespace fovea {

template <typename... Args>
[[noreturn]] void fail(ErrorCode code, fmt::format_string<Args...> format, Args&&... args) {
  throw Error(code, fmt::format(format, std::forward<Args>(args)...));
}

// Throws Error{invalid_argument} with the composed message if the condition is false:
//   check_argument(heads > 0, "q_heads is {}, must be positive", heads);
template <typename... Args>
void check_argument(bool condition, fmt::format_string<Args...> format, Args&&... args) {
  if (!condition) fail(ErrorCode::invalid_argument, format, std::forward<Args>(args)...);
}

// Throws Error{invalid_argument} if `value` is no enumerator; `last` is the last one. Callers
// compiled against another version may pass such numbers.
//   check_enum(spec.order, KvOrder::hnd, "order", "KvOrder");
template <typename Enum>
void check_enum(Enum value, Enum last, std::string_view name, std::string_view type) {
  check_argument(value >= Enum{} && value <= last, "{} is {}({})", name, type,
                 static_cast<int>(value));
}

// Throws Error{invalid_argument} if the address is not aligned for a T. Null is aligned.
template <typename T>
void check_aligned(const T* data, std::string_view name) {
  check_argument(reinterpret_cast<uintptr_t>(data) % alignof(T) == 0,
                 "{} is at {}, must be aligned to {} bytes", name, static_cast<const void*>(data),
                 alignof(T));
}

}  // namespace fovea
