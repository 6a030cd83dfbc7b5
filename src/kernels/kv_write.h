// SPDX-License-Identifier: Apache-2.0
// Stores new keys and values in a cache, converting and scaling on the way.
#pragma once

#include <cstdint>

#include "fovea/kv_cache.h"
#include "fovea/tensor.h"

namespace fovea::kernels {

struct KvWriteParams {
  KvLayerView cache;
  HeadRows k;  // [tokens, kv_heads, head_dim]; mla: latent [tokens, 1, kv_lora_rank]
  HeadRows v;  // [tokens, kv_heads, head_dim_v]; mla: rotary key [tokens, 1, rope_dim]
  const int64_t* slots = nullptr;     // [tokens]; -1 and what slot_map drops are skipped
  const int64_t* slot_map = nullptr;  // KvPool::slot_map().data(), or null
  int32_t tokens = 0;
  int32_t kv_heads = 0;
  int32_t head_dim = 0;    // of `k` as passed
  int32_t head_dim_v = 0;  // of `v` as passed
};

}  // namespace fovea::kernels
