// SPDX-License-Identifier: Apache-2.0
// Arrays over memory of Fovea's objects, for other libraries.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <vector>

#include "python/bindings/array.h"

namespace fovea::python {

struct LayerArray {
  nb::object owner;  // keeps the memory
  void* data = nullptr;
  DlType dtype = {};
  DlDevice device = {};
  std::vector<int64_t> shape = {}, strides = {};  // in elements
};

// Describes a dense array in host memory.
LayerArray dense_array(nb::handle owner, const void* data, DType dtype, std::vector<int64_t> shape);

}  // namespace fovea::python
