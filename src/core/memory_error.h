// SPDX-License-Identifier: Apache-2.0
// Turns failed allocations into Error{out_of_memory}.
#pragma once

#include <exception>
#include <new>
#include <stdexcept>
#include <utility>

#include "core/check.h"

namespace fovea {

// Runs `action` and returns its result. If an allocation in it fails, throws Error{out_of_memory}
// with a composed description of what needed the memory:
//   name_memory([&] { slots.resize(count); }, "a slot map of {} entries", count);
// Public functions use it around all allocations whose size depends on the caller.
template <typename Action, typename... Args>
decltype(auto) name_memory(Action&& action, fmt::format_string<Args...> what, Args&&... args) {
  try {
    return std::forward<Action>(action)();
  } catch (const std::exception& error) {
    // A length_error means a size beyond what a container can hold.
    const bool memory = dynamic_cast<const std::bad_alloc*>(&error) != nullptr ||
                        dynamic_cast<const std::length_error*>(&error) != nullptr;
    if (!memory) throw;
  }
  fail(ErrorCode::out_of_memory, "{}: the system has no memory for it",
       fmt::format(what, std::forward<Args>(args)...));
}

}  // namespace fovea
