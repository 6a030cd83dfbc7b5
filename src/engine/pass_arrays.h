// SPDX-License-Identifier: Apache-2.0
// The arrays of a batch, as every runner fills them from the parts of a pass.
#pragma once

#include <cstdint>
#include <span>

#include "engine/model_runner.h"
#include "fovea/batch.h"
#include "fovea/kv_cache.h"

namespace fovea {

// The sizes of a pass: requests, new tokens, and rows of logits. For a captured pass these are the
// sizes of its graph.
struct PassSize {
  int32_t requests = 0, tokens = 0, logit_rows = 0;
  int32_t max_q_len = 0, max_kv_len = 0;
  int32_t draw_count = 0;        // entries of the list of draws, of which some may draw nothing
  bool draws = false;            // the listed tokens are drawn
  bool shares_prefixes = false;  // the batch names its shared prefixes
  bool snapshots = false;        // the batch names slots of the states after its tokens
  bool kept_drafts = false;      // the batch names the drafts that states keep
  bool trees = false;            // the batch has positions and a tree mask
  bool padded = false;           // the sizes are a graph's
  ForwardMode mode = ForwardMode::extend;
};

// Host memory of a runner, with room for its BatchLimits. The names are those of ModelInputs and
// BatchView.
struct PassArrays {
  int32_t *tokens, *positions, *logit_rows, *features;  // [max_tokens]
  int32_t* places;      // [max_tokens] number of each token among the stored ones of its request
  uint64_t* ancestors;  // [max_tokens] TreeMask; unset for parts of more tokens than it has bits
  int64_t* out_slots;   // [max_tokens]
  int32_t* snapshot_slots;                         // [max_tokens]
  int32_t* q_indptr;                               // [max_requests + 1]
  int32_t *kv_lens, *request_rows, *draft_counts;  // [max_requests]
};

// Fills the arrays, one request per part, and returns all sizes but those of draws, and without
// `shares_prefixes`.
// Throws Error{invalid_argument} if the parts exceed the limits.
PassSize fill_arrays(std::span<const PassPart> parts, const BatchLimits& limits,
                     RequestTable& table, const PassArrays& arrays);

}  // namespace fovea
