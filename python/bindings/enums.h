// SPDX-License-Identifier: Apache-2.0
// Enumerations, which Python sees as classes of named strings.
#pragma once

#include <nanobind/nanobind.h>

#include <span>
#include <string>
#include <string_view>

#include "fovea/batch.h"
#include "fovea/engine.h"
#include "fovea/select_backend.h"

namespace fovea::python {

namespace nb = nanobind;

template <typename Enum>
struct Enumerator {
  Enum value;
  const char* member;  // the name in C++ and of the member in Python
  const char* text;    // the member's value
};

template <typename Enum>
std::span<const Enumerator<Enum>> enumerators();

// Throws Error{invalid_argument} that begins with `name` and lists the enumerators.
template <typename Enum>
Enum enum_from(nb::handle object, std::string_view name);

void bind_enums(nb::module_& module);

}  // namespace fovea::python
