// SPDX-License-Identifier: Apache-2.0
// Batches as Python objects.
#pragma once

#include <nanobind/nanobind.h>

#include "fovea/batch.h"
#include "python/bindings/array.h"

namespace fovea::python {

// A BatchView with its arrays.
struct Batch {
  BatchView view = {};
  bool has_arrays = false;  // else the batch has no device
  Device device = {};
  const DlExchangeApi* api = nullptr;  // that of the first array; null: its library has none
  Keeper keeper = {};
};

}  // namespace fovea::python
