// SPDX-License-Identifier: Apache-2.0
// Checks of a layer's tensors, made by every forward(): presence, types and layouts, no contents.
#pragma once

#include "fovea/attention_backend.h"

namespace fovea {

// Both throw Error{invalid_argument} naming the tensor. This one is for softmax kinds; `cached`:
// the backend has a pool.
void validate_layer(const LayerTensors& layer, const AttentionSpec& spec, const BatchView& batch,
                    bool cached);
// For linear kinds.
void validate_linear_layer(const LayerTensors& layer, const AttentionSpec& spec,
                           const BatchView& batch);

// True if forward() must store the layer's k and v (mla: latent and rotary key) in the pool.
inline bool stores(const LayerTensors& layer) {
  return layer.save_kv && (layer.k || layer.mla.latent);
}

}  // namespace fovea
