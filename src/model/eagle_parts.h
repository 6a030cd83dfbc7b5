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
  std::unique_ptr<Block> mixer, feed;
  std::unique_ptr<RotaryTable> rotary;
  Linear head;
  const int32_t* columns = nullptr;  // [vocabulary] the head's logit of each token; null: its own
};

std::unique_ptr<EagleHead> make_eagle_head(EagleParts parts);

}  // namespace fovea
