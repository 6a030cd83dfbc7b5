// SPDX-License-Identifier: Apache-2.0
// The drafts that the slots of a state pool keep, on the CPU: which of them a pass takes over,
// their rows, and the state that they must leave as it is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "fovea/attention_backend.h"
#include "fovea/batch.h"
#include "fovea/kv_cache.h"

namespace fovea {

// The drafts of a request: those of earlier passes that belong to its tokens now, and the last of
// its new tokens.
struct DraftTokens {
  int32_t replayed = 0, drafts = 0;
  int32_t row = 0;  // the first one's in the slot

  bool any() const { return replayed + drafts > 0; }
};

class KeptDrafts {
 public:
  // Allocates what forward() needs. The pool must outlive the object.
  KeptDrafts(const AttentionSpec& spec, const StatePool& pool);

  // Writes the drafts of each request to `to` ([requests]), and marks what slots hold behind the
  // pass. The batch is valid.
  void plan(const BatchView& batch, DraftTokens* to) const;

  // Returns copies of the inputs of a request's replayed drafts; other fields are those of `given`.
  LinearTensors gather(const LinearTensors& given, const StateLayerView& state, int32_t slot,
                       const DraftTokens& tokens);
  // Keeps the inputs of `tokens.drafts` tokens of the batch from `first` on.
  void keep(const LinearTensors& given, int32_t first, const StateLayerView& state, int32_t slot,
            const DraftTokens& tokens) const;

  // Save the state and the window of a slot, zeros with `is_new`, and write them back.
  void save(const StateLayerView& state, int32_t slot, bool is_new);
  void restore(const StateLayerView& state, int32_t slot) const;

  // Room for the results of replayed drafts: [max_drafts, conv_dim] and [max_drafts, value_heads,
  // value_dim].
  float* convolved() { return convolved_.data(); }
  float* out() { return out_.data(); }

 private:
  float* row(const StateLayerView& state, int32_t slot, const DraftTokens& tokens,
             int32_t index) const;

  const StatePool& pool_;
  DraftRow layout_;
  int64_t channels_;
  std::vector<float> mixed_, decays_, betas_, convolved_, out_, window_;
  std::vector<std::byte> state_;
};

}  // namespace fovea
