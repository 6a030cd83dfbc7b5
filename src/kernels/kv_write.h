// SPDX-License-Identifier: Apache-2.0
// Stores new keys and values in a cache, converted and scaled.
#pragma once

#include <cstdint>

#include "fovea/attention_backend.h"
#include "fovea/kv_cache.h"
#include "fovea/tensor.h"

namespace fovea::kernels {

// A value is stored as f32(x) / scale, rounded to nearest even. fp8 saturates, infinities included;
// NaN stays NaN. per_token_head computes scale = amax / (largest finite value of the dtype) over
// the finite values of the row (mla: latent and rotary key together; mla_fp8_rows: each 128 values
// of the latent), or 1 if that is below the smallest normal f32, and stores it with the row.
// Slots of page 0 receive finite values only: NaN becomes 0, an infinity the largest finite value.
struct KvWriteParams {
  KvLayerView cache;
  HeadRows k;  // [tokens, kv_heads, head_dim]; mla: latent [tokens, 1, kv_lora_rank]
  HeadRows v;  // [tokens, kv_heads, head_dim_v]; mla: rotary key [tokens, 1, rope_dim]
  const int64_t* slots = nullptr;     // [tokens]; -1 and slots that slot_map drops are skipped
  const int64_t* slot_map = nullptr;  // KvPool::slot_map().data(), or null
  int32_t tokens = 0;
  int32_t kv_heads = 0;
  int32_t head_dim = 0;    // width of `k`
  int32_t head_dim_v = 0;  // width of `v`
};

// to[t, h] = rotated from[t, h], or rotated norm(from[t, h]), for every backend on the CPU.
struct RotateHeadsParams {
  RotaryTensors rotary;  // its norms are not used
  HeadRows from;
  HeadRows to;  // same dtype as `from`; may be `from`
  int32_t tokens = 0;
  int32_t heads = 0;
  int32_t head_dim = 0;
  HeadNorm norm = {};
};
// Throws Error{invalid_argument} naming a position that the tables do not have.
void rotate_heads(const RotateHeadsParams& params, ThreadPool& threads);

}  // namespace fovea::kernels
