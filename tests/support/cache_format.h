// SPDX-License-Identifier: Apache-2.0
// Computes the expected contents of a cache, from the rules of kernels/kv_write.h alone.
#pragma once

#include <vector>

#include "support/attention_case.h"

namespace fovea::test {

// Returns the scales that a caller sets in per_tensor and per_head caches.
std::vector<float> given_k_scales(const KvCacheSpec& cache);
std::vector<float> given_v_scales(const KvCacheSpec& cache);

// One stored row and its values.
struct StoredRow {
  std::vector<char> bytes;
  float scale = 1;             // per_token_head: stored with the row
  std::vector<double> values;  // dequantised
};

struct StoredToken {
  std::vector<StoredRow> k, v;  // [kv_heads]; mla: one k, which holds latent and rotary key, no v
};

// Returns the rows that a cache of this format has for token `token` of `request`.
StoredToken store_token(const AttentionSpec& spec, const KvCacheSpec& cache,
                        const RequestData& request, int32_t token);

}  // namespace fovea::test
