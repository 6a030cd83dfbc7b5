// SPDX-License-Identifier: Apache-2.0
// What a cache must hold for given inputs, written from the rules of kernels/kv_write.h alone.
#pragma once

#include <vector>

#include "support/attention_case.h"

namespace fovea::test {

// The scales a caller gives to per_tensor and per_head caches.
std::vector<float> given_k_scales(const KvCacheSpec& cache);
std::vector<float> given_v_scales(const KvCacheSpec& cache);

// One row as it lies in the cache, and what it means.
struct StoredRow {
  std::vector<char> bytes;
  float scale = 1;             // per_token_head: stored beside the row
  std::vector<double> values;  // dequantised
};

struct StoredToken {
  std::vector<StoredRow> k, v;  // [kv_heads]; mla: one k, which holds latent and rotary key, no v
};

// What token `token` of `request` leaves in a cache of this format.
StoredToken store_token(const AttentionSpec& spec, const KvCacheSpec& cache,
                        const RequestData& request, int32_t token);

}  // namespace fovea::test
