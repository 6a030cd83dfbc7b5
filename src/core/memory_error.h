// SPDX-License-Identifier: Apache-2.0
// Where the system refuses memory, callers of the library see Error{out_of_memory}.
#pragma once

#include <exception>
#include <new>
#include <stdexcept>
#include <utility>

#include "core/check.h"

namespace fovea {

// Runs `action` and returns what it returns. Where the action finds no memory, it throws
// Error{out_of_memory} with the composed words for what was asked for:
//   name_memory([&] { slots.resize(count); }, "a slot map of {} entries", count);
// Public functions call it around all they allocate by a size of the caller's.
template <typename Action, typename... Args>
decltype(auto) name_memory(Action&& action, fmt::format_string<Args...> what, Args&&... args) {
  try {
    return std::forward<Action>(action)();
  } catch (const std::exception& error) {
    // A length_error: more than a container can ever hold.
    const bool memory = dynamic_cast<const std::bad_alloc*>(&error) != nullptr ||
                        dynamic_cast<const std::length_error*>(&error) != nullptr;
    if (!memory) throw;
  }
  fail(ErrorCode::out_of_memory, "{}: the system has no memory for it",
       fmt::format(what, std::forward<Args>(args)...));
}

}  // namespace fovea
