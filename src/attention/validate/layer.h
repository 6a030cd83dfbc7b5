// SPDX-License-Identifier: Apache-2.0
// Checks of a layer's tensors that every forward() makes: presence and dtypes, no contents.
#pragma once

#include "fovea/attention_backend.h"

namespace fovea {

// All throw Error{invalid_argument} naming the tensor. Softmax kinds; `cached`: they have a pool.
void validate_layer(const LayerTensors& layer, const AttentionSpec& spec, const BatchView& batch,
                    bool cached);
// Linear kinds.
void validate_linear_layer(const LayerTensors& layer, const AttentionSpec& spec,
                           const BatchView& batch);

// Whether forward() is to store the layer's k and v in the pool.
inline bool stores(const LayerTensors& layer) { return layer.save_kv && layer.k; }

}  // namespace fovea
