// SPDX-License-Identifier: Apache-2.0
// Multi-head latent attention (arXiv:2405.04434). The cache holds one normalised latent and one
// rotary key per token. The backend gets the up-projections and decides whether to absorb or apply
// them.
#pragma once

#include <memory>

#include "model/from_config.h"

namespace fovea {

// Reads heads and widths of all ranks. `rope` changes the scale of scores.
AttentionSpec read_latent_spec(const JsonObject& config, const kernels::RopeSpec& rope = {});

// Reads the block, cut down to the heads of the device's rank. Without `rotary`, and without
// spec.has_rope, the rotary parts of queries and keys have no positions.
std::unique_ptr<Block> read_latent_attention(const JsonObject& config, const Weights& weights,
                                             const AttentionSpec& spec, LayerSlot slot,
                                             const Rotary& rotary = {});

}  // namespace fovea
