// SPDX-License-Identifier: Apache-2.0
// The common structure of all decoder-only models: embedding, residual layers, final norm,
// vocabulary head. An architecture fills in DecoderParts.
#pragma once

#include <memory>
#include <vector>

#include "model/layers.h"
#include "model/model.h"
#include "model/weights.h"

namespace fovea {

// Computes x += norm(block(norm(x))), first for the mixer and then for the feed-forward block, if
// the layer has one.
struct DecoderLayer {
  Norm mixer_norm;  // optional
  std::unique_ptr<Block> mixer;
  Norm mixer_out_norm;          // optional
  Norm feed_norm;               // optional
  std::unique_ptr<Block> feed;  // or null
  Norm feed_out_norm;           // optional
};

// Frequencies and their table, which is made when the context is known.
struct RotaryTable {
  kernels::RopeSpec spec;
  kernels::RopeTableView view;

  // Places the table for positions below `positions` on the device.
  void make(ModelDevice& device, int32_t positions);
  size_t bytes(const ModelDevice& device, int32_t positions) const;
};

struct DecoderParts {
  ModelInfo info;
  std::shared_ptr<ModelDevice> device;
  std::unique_ptr<const Checkpoint> checkpoint;  // on the CPU, all matrices point into it
  const std::byte* embedding = nullptr;          // [vocabulary, hidden] on the device
  DType embedding_dtype = DType::f32;
  float embedding_factor = 1;
  std::vector<DecoderLayer> layers;
  float branch_factor = 1;  // multiplies the result of a block before it is added
  Norm final_norm;
  Linear head;
  std::vector<std::unique_ptr<RotaryTable>> rotary_tables;
  float logit_cap = 0;  // logits become cap * tanh(logits / cap); 0 disables it

  Weights weights() const { return Weights(*checkpoint, *device); }
};

std::unique_ptr<Model> make_decoder(DecoderParts parts);

// Adds model layer `layer` to the group with an equal spec, or to a new group, which describes its
// states if the kind is linear.
LayerSlot join_group(ModelInfo& info, int32_t layer, const AttentionSpec& spec);

}  // namespace fovea
