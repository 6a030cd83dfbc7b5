// SPDX-License-Identifier: Apache-2.0
// The parts of a drafting head, which load_eagle_head() reads.
#pragma once

#include <memory>

#include "model/decoder.h"
#include "model/eagle_head.h"
#include "model/layers.h"

namespace fovea {

struct EagleParts {
  ModelInfo info;
  std::shared_ptr<ModelDevice> device;
  std::unique_ptr<const Checkpoint> checkpoint;
  EmbeddingTable embedding;
  FeatureTap tap;
  Norm embedding_norm, hidden_norm, feed_norm, final_norm;
  // If set, makes the residual stream of both inputs, which mixer_norm precedes the mixer.
  // Otherwise the stream is the second input, and the mixer reads both.
  Linear join;  // [hidden, 2 x hidden]
  Norm mixer_norm;
  std::unique_ptr<Block> mixer, feed;
  std::unique_ptr<RotaryTable> rotary;
  // The features of the next draft are the results of final_norm; otherwise they precede it.
  bool final_norm_makes_features = false;
  Linear head;
  const int32_t* columns = nullptr;  // [vocabulary] the head's logit of each token; null: its own
};

// Reads an MTP layer of DeepSeek-V3: norms, matrices, attention and experts. Its embedding and its
// head may be the model's.
void read_deepseek_mtp(const JsonObject& config, const Weights& layer, EagleParts& parts);
// Reads the MTP layer of Qwen3-Next, the tensors under `mtp`: norms, matrices, attention with an
// output gate, and experts.
void read_qwen3_next_mtp(const JsonObject& config, const Weights& mtp, EagleParts& parts);

std::unique_ptr<EagleHead> make_eagle_head(EagleParts parts);

}  // namespace fovea
