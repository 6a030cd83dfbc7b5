// SPDX-License-Identifier: Apache-2.0
// The frame all decoder-only models share: embedding, residual layers, final norm, vocabulary head.
// An architecture fills in DecoderParts.
#pragma once

#include <memory>
#include <vector>

#include "model/layers.h"
#include "model/model.h"
#include "model/weights.h"

namespace fovea {

// x += norm(block(norm(x))), once for the mixer and once for the feed-forward block.
struct DecoderLayer {
  Norm mixer_norm;  // empty: none
  std::unique_ptr<Block> mixer;
  Norm mixer_out_norm;  // empty: none
  Norm feed_norm;       // empty: none
  std::unique_ptr<Block> feed;
  Norm feed_out_norm;  // empty: none
};

// Frequencies and, once the context is known, the table made of them.
struct RotaryTable {
  kernels::RopeSpec spec;
  kernels::RopeTableView view;
};

struct DecoderParts {
  ModelInfo info;
  std::shared_ptr<ModelDevice> device;
  std::unique_ptr<const Checkpoint> checkpoint;  // on the CPU what every matrix points into
  const std::byte* embedding = nullptr;          // [vocabulary, hidden], on the device
  DType embedding_dtype = DType::f32;
  float embedding_factor = 1;
  std::vector<DecoderLayer> layers;
  float branch_factor = 1;  // multiplies the result of a block before it is added
  Norm final_norm;
  Linear head;
  std::vector<std::unique_ptr<RotaryTable>> rotary_tables;
  float logit_cap = 0;  // logits <- cap * tanh(logits / cap); 0: off

  Weights weights() const { return Weights(*checkpoint, *device); }
};

std::unique_ptr<Model> make_decoder(DecoderParts parts);

// Puts model layer `layer` into the group with an equal spec, or into a new one.
LayerSlot join_group(ModelInfo& info, int32_t layer, const AttentionSpec& spec,
                     const StateCacheSpec& state = {});

}  // namespace fovea
