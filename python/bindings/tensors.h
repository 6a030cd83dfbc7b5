// SPDX-License-Identifier: Apache-2.0
// The tensors of one layer as keyword arguments.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <limits>

#include "fovea/attention_backend.h"
#include "python/bindings/array.h"

namespace fovea::python {

// Rotary positions with their arrays.
struct Rotary {
  RotaryTensors tensors = {};
  int64_t rows = 0;  // number of positions
  Device device = {};
  Keeper keeper = {};
};

// Checked tensors of a layer. It borrows the arrays, except what `__dlpack__` returned for them.
struct LayerInput {
  LayerTensors tensors = {};
  // The largest number of tokens that the arrays have rows for, and the array that limits it.
  int64_t rows = std::numeric_limits<int64_t>::max();
  const char* shortest = nullptr;
  const DlExchangeApi* api = nullptr;  // that of the first array; null: its library has none
  Keeper keeper = {};
};

// The spec and the place of a backend, which decide what its tensors look like.
struct LayerShape {
  const AttentionSpec& spec;
  Device device;
};

// Reads the keyword arguments of forward() and bind(). With `keep`, the result also keeps the
// arrays. `stream` receives the argument of that name, which bind() does not have.
void read_layer(const nb::kwargs& arguments, const LayerShape& shape, LayerInput& input, bool keep,
                nb::handle* stream);

// The arguments that nearly every forward() has. Each may be None.
struct LayerRows {
  nb::handle q, k, v, out;
};

// Reads a layer that has no other arguments, without the dictionary that keyword arguments need.
void read_rows(const LayerRows& rows, const LayerShape& shape, LayerInput& input);

}  // namespace fovea::python
