// SPDX-License-Identifier: Apache-2.0
// Heads that draft from what another model has computed of a text: EAGLE-3 (arXiv:2503.01840), in
// the form of its public checkpoints, and the MTP layers of DeepSeek-V3 (arXiv:2412.19437) and
// Qwen3-Next. A head is one decoder layer. Its token i has two inputs: the embedding of token i + 1
// of the text, and the features that the model noted of token i, or, where the model has not
// computed token i yet, the head's own hidden state before it. It predicts token i + 2.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "model/model.h"

namespace fovea {

// ModelInputs::tokens are tokens i + 1 at positions i. ModelInputs::features are rows of one table:
// first those of all cache slots of the model, then the hidden states of the logit rows of the
// head's last pass, in their order.
class EagleHead : public Model {
 public:
  // Returns the layers and the projection of the features that the head reads, without rows.
  virtual const FeatureTap& tap() const = 0;
  virtual size_t feature_bytes(int64_t slots, int32_t max_tokens) const = 0;
  // Allocates the table, for a model with so many slots and passes of the head of up to max_tokens
  // tokens, and returns the tap of the model.
  virtual FeatureTap reserve_features(int64_t slots, int32_t max_tokens) = 0;
};

// Reads config.json and model.safetensors of the folder `path`: fc, midlayer, norm, lm_head and,
// for a part of the vocabulary, d2t, which is what to add to the head's token to get the model's.
// Embeddings are the model's if there is no embed_tokens. If the config is that of DeepSeek-V3 or
// Qwen3-Next, reads its MTP layer, which a published checkpoint has itself: model.layers.N with N
// layers before it, or mtp. Embeddings and head are the model's if the layer has none. `model` must
// outlive the head.
// With `random`, generates the weights, as load_model() does. Throws Error{unsupported} or
// Error{invalid_argument} that names what does not fit the model: vocabulary, width or layers.
std::unique_ptr<EagleHead> load_eagle_head(const std::string& path,
                                           std::shared_ptr<ModelDevice> device, const Model& model,
                                           const std::optional<RandomSource>& random = {});

}  // namespace fovea
