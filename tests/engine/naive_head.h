// SPDX-License-Identifier: Apache-2.0
// A head without weights, whose drafts a test computes from the text alone. A feature is a hash of
// the text up to its token. The head's hidden state is a hash of its input and of the sum of all
// its entries before, which its attention reads from its cache: keys are 0, so that a result is the
// mean of all values. Some logits are NaN, and give no draft.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <span>
#include <vector>

#include "fovea/attention_backend.h"
#include "model/eagle_head.h"

namespace fovea::naive {

inline constexpr int32_t kVocabulary = 3;  // few, so that drafts are often right
inline constexpr int32_t kContext = 60, kMaxRequests = 5, kMaxDrafts = 6, kBranches = 2, kDim = 8;
inline constexpr int32_t kMaxBatchTokens = 24;

// Hashes have 20 bits, which f32 holds.
inline uint32_t mix(uint32_t hash, uint32_t value) {
  return ((hash ^ (value + 1)) * 2654435761u) >> 7 & 0xfffff;
}
inline uint32_t value_of(uint32_t feature, int32_t token) {
  return mix(feature, static_cast<uint32_t>(token)) & 1023;
}
inline uint32_t hidden_of(uint32_t feature, int32_t token, uint32_t sum) {
  return mix(mix(feature, static_cast<uint32_t>(token) + 77), sum);
}

inline constexpr int32_t kNoToken = -2;
inline int32_t token_of(uint32_t hidden) {
  return hidden % 64 == 5 ? kNoToken : static_cast<int32_t>(hidden % kVocabulary);
}

// Returns the token that follows a text of two tokens at least and some drafts.
inline int32_t next_after(std::vector<int32_t> text, const std::vector<int32_t>& drafts) {
  const size_t length = text.size();
  text.insert(text.end(), drafts.begin(), drafts.end());
  uint32_t prefix = 0, sum = 0, hidden = 0;
  for (size_t i = 0; i + 1 < text.size(); ++i) {
    prefix = mix(prefix, static_cast<uint32_t>(text[i]));
    const uint32_t feature = i + 1 < length ? prefix : hidden;
    sum += value_of(feature, text[i + 1]);
    hidden = hidden_of(feature, text[i + 1], sum);
  }
  return token_of(hidden);
}

// Returns the last token of the text, and the drafts after it.
inline std::vector<int32_t> chain_after(const std::vector<int32_t>& text, int32_t drafts) {
  std::vector<int32_t> chain;
  for (int32_t i = 0; i < drafts; ++i) {
    const int32_t token = next_after(text, chain);
    if (token == kNoToken) break;
    chain.push_back(token);
  }
  chain.insert(chain.begin(), text.back());
  return chain;
}

class NaiveHead final : public EagleHead {
 public:
  explicit NaiveHead(ThreadPool& threads) : device_(make_host_device(threads)) {
    info_ = {.architecture = "Naive",
             .layers = 1,
             .hidden = 1,
             .vocabulary = kVocabulary,
             .max_context = kContext,
             .default_context = kContext};
    AttentionSpec spec;
    spec.q_heads = spec.kv_heads = 1;
    spec.head_dim = spec.head_dim_v = kDim;
    info_.groups.push_back({spec, {0}, {}});
  }
  const ModelInfo& info() const override { return info_; }
  ModelDevice& device() const override { return *device_; }
  EmbeddingTable embedding() const override { return {}; }
  Linear head() const override { return {}; }
  void set_tap(FeatureTap) override {}
  size_t weight_bytes() const override { return 0; }
  size_t activation_bytes(int32_t) const override { return 0; }
  size_t position_bytes(int32_t) const override { return 0; }
  void reserve(int32_t, int32_t) override {}
  const FeatureTap& tap() const override { return tap_; }
  size_t feature_bytes(int64_t slots, int32_t max_tokens) const override {
    return static_cast<size_t>(slots + max_tokens) * sizeof(float);
  }
  FeatureTap reserve_features(int64_t slots, int32_t max_tokens) override {
    slots_ = static_cast<size_t>(slots);
    table_.resize(slots_ + static_cast<size_t>(max_tokens));
    return tap_;
  }

  void forward(const ModelInputs& inputs, std::span<AttentionBackend* const> backends) override {
    const size_t rows = inputs.tokens.size();
    std::vector<uint32_t> features(rows);
    std::vector<float> zeros(rows * kDim), values(rows * kDim), means(rows * kDim);
    for (size_t row = 0; row < rows; ++row) {
      features[row] = static_cast<uint32_t>(table_[static_cast<size_t>(inputs.features[row])]);
      std::fill_n(values.begin() + static_cast<int64_t>(row * kDim), kDim,
                  static_cast<float>(value_of(features[row], inputs.tokens[row])));
    }
    LayerTensors tensors;
    tensors.q = tensors.k = dense_rows(zeros.data(), DType::f32, 1, kDim);
    tensors.v = dense_rows(values.data(), DType::f32, 1, kDim);
    tensors.out = dense_rows(means.data(), DType::f32, 1, kDim);
    backends[0]->forward(tensors, device_->stream());
    hidden_.clear();
    for (const int32_t row : inputs.logit_rows) {
      const auto at = static_cast<size_t>(row);
      const double sum = static_cast<double>(means[at * kDim]) * (inputs.positions[at] + 1);
      hidden_.push_back(
          hidden_of(features[at], inputs.tokens[at], static_cast<uint32_t>(std::lround(sum))));
      table_[slots_ + hidden_.size() - 1] = static_cast<float>(hidden_.back());
    }
  }
  void logits(int64_t first_row, std::span<float> logits) override {
    std::ranges::fill(logits, 0.0f);
    for (size_t row = 0; row < logits.size() / kVocabulary; ++row) {
      const int32_t token = token_of(hidden_[static_cast<size_t>(first_row) + row]);
      logits[row * kVocabulary + static_cast<size_t>(std::max(token, 0))] =
          token == kNoToken ? std::numeric_limits<float>::quiet_NaN() : 1;
    }
  }
  // Stores the feature of a token that the model has computed.
  void note(int32_t slot, uint32_t feature) {
    table_[static_cast<size_t>(slot)] = static_cast<float>(feature);
  }

 private:
  std::shared_ptr<ModelDevice> device_;
  ModelInfo info_;
  FeatureTap tap_;
  size_t slots_ = 0;
  std::vector<float> table_;
  std::vector<uint32_t> hidden_;
};

}  // namespace fovea::naive
