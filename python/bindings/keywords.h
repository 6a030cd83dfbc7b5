// SPDX-License-Identifier: Apache-2.0
// Functions with many keyword arguments.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <array>
#include <string>

#include "core/check.h"

namespace fovea::python {

namespace nb = nanobind;

// The names of a function's keyword arguments. Objects live as long as the process.
template <size_t kCount>
class Keywords {
 public:
  explicit Keywords(const char* const (&names)[kCount]) {
    for (size_t i = 0; i < kCount; ++i) {
      names_[i] = names[i];
      interned_[i] = PyUnicode_InternFromString(names[i]);
    }
  }

  // Returns the arguments in the order of the names, with an invalid handle for those not given or
  // None. Throws Error{invalid_argument} naming an argument that the function does not have.
  std::array<nb::handle, kCount> read(const nb::kwargs& arguments, const char* function) const {
    std::array<nb::handle, kCount> values;
    PyObject *key = nullptr, *value = nullptr;
    Py_ssize_t position = 0;
    while (PyDict_Next(arguments.ptr(), &position, &key, &value) != 0) {
      const size_t index = find(key);
      if (index == kCount) fail_unknown(key, function);
      if (value != Py_None) values[index] = value;
    }
    return values;
  }

 private:
  size_t find(PyObject* key) const {
    for (size_t i = 0; i < kCount; ++i) {
      if (interned_[i] == key) return i;
    }
    const std::string name = nb::cast<std::string>(nb::handle(key));
    for (size_t i = 0; i < kCount; ++i) {
      if (name == names_[i]) return i;
    }
    return kCount;
  }

  [[noreturn]] void fail_unknown(PyObject* key, const char* function) const {
    std::string known;
    for (const char* name : names_) known += fmt::format("{}{}", known.empty() ? "" : ", ", name);
    fail(ErrorCode::invalid_argument, "{} has no argument '{}', known: {}", function,
         nb::cast<std::string>(nb::handle(key)), known);
  }

  std::array<const char*, kCount> names_ = {};
  std::array<PyObject*, kCount> interned_ = {};
};

}  // namespace fovea::python
