// SPDX-License-Identifier: Apache-2.0
// Scales of quantized keys and values.
#pragma once

#include "kernels/cpu/simd/attention/keys.h"
#include "kernels/cpu/simd/attention/transpose.h"
#include "kernels/cpu/simd/exponentials.h"

namespace fovea::kernels::cpu::FOVEA_ISA {
namespace {

// Returns the scale of a tensor or of one kv head; 1 if there is none.
inline float tensor_scale(const KvLayerView& cache, const float* scales, int32_t head) {
  if (cache.scale == KvScale::per_tensor) return scales[0];
  return cache.scale == KvScale::per_head ? scales[head] : 1.0f;
}

// Returns the factor of the scores of one kv head: softmax scale x log2(e) x scale of K.
inline float score_factor(const AttentionParams& params, int32_t head) {
  const KvLayerView& cache = params.keys.cache;
  const float k_scale = params.keys.page_table ? tensor_scale(cache, cache.k_scale, head) : 1.0f;
  return params.scale * k_scale * kLog2E;
}

// Loads the scales of 4 heads for kLanes keys of the tile, from key `first` on. `scales` points to
// the first head.
HWY_INLINE void load_scales_of_4(const TileKeys& tile, int32_t first, const float* scales,
                                 F32 (&heads)[4]) {
  const hn::Rebind<int32_t, F32Tag> d32;
  F32 keys[4];  // keys[j] block b: key 4 * b + j
  for (int32_t j = 0; j < 4; ++j) {
    const int64_t* at = tile.scale + first + j;
    keys[j] = hn::LoadDup128(kF32, scales + at[0]);
    for (int32_t b = 1; b < kLanes / 4; ++b) {
      const auto from_b = hn::RebindMask(kF32, hn::Gt(hn::Iota(d32, 0), hn::Set(d32, 4 * b - 1)));
      keys[j] = hn::IfThenElse(from_b, hn::LoadDup128(kF32, scales + at[4 * b]), keys[j]);
    }
  }
  transpose_blocks(keys, heads);
}

// Sets to[head * kTileKeys + n] to the scale of key n of the tile for each of `heads` heads, the
// first of them at `scales`, and to 0 for keys outside the item.
inline void load_scales(const TileKeys& tile, const float* scales, int32_t heads, float* to) {
  int32_t head = 0;
  const bool whole = tile.begin == 0 && tile.end == kTileKeys;
  for (; whole && head + 4 <= heads; head += 4) {
    for (int32_t n = 0; n < kTileKeys; n += kLanes) {
      F32 four[4];
      load_scales_of_4(tile, n, scales + head, four);
      for (int32_t i = 0; i < 4; ++i) store(four[i], to + (head + i) * kTileKeys + n);
    }
  }
  for (; head < heads; ++head) {
    for (int32_t n = 0; n < kTileKeys; ++n) {
      const bool owned = n >= tile.begin && n < tile.end;
      to[head * kTileKeys + n] = owned ? scales[tile.scale[n] + head] : 0.0f;
    }
  }
}

}  // namespace
}  // namespace fovea::kernels::cpu::FOVEA_ISA
