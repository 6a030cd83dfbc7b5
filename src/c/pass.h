// SPDX-License-Identifier: Apache-2.0
// Makes views of a pass from C structs. Nothing is allocated unless an argument is refused, which
// throws Error{invalid_argument}.
#pragma once

#include <cstdint>

#include "fovea/attention_backend.h"
#include "fovea/batch.h"
#include "fovea/fovea.h"

namespace fovea::c {

// `limits` are those of the backend.
BatchView to_batch(const fovea_batch* batch, Device device, const BatchLimits& limits);

inline constexpr fovea_layer_tensors kDefaultLayer = {.struct_size = sizeof(fovea_layer_tensors),
                                                      .save_kv = 1};

// The layer's part of a planned batch.
struct LayerShape {
  const AttentionSpec& spec;
  Device device;
  int64_t tokens;
};
LayerTensors to_layer(const fovea_layer_tensors& layer, const LayerShape& shape);

}  // namespace fovea::c
