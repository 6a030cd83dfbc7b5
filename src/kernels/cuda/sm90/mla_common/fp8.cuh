// SPDX-License-Identifier: Apache-2.0
// fp8 caches: the layout of a row, its conversion to f16, and the scales that products leave to
// scores and outputs.
#pragma once

#include "kernels/cuda/common/bf16_as.cuh"
#include "kernels/cuda/sm90/mla_common/tiles.cuh"

namespace fovea::kernels::cuda {

// Bytes of a row: latent values, with fp8_rows a scale for each 128 of them, RoPE columns.
template <int kRank, int kRope, Keys kKeys>
struct Fp8Row {
  static constexpr int kScales = kRank / 128;
  static constexpr int kRopeOffset = kKeys == fp8_rows ? kRank + kScales * 4 : kRank;
  static constexpr int kBytes = kRopeOffset + (kKeys == fp8_rows ? 2 * kRope : kRope);
};

// True if latent columns of q are multiplied without conversion.
template <class C>
constexpr bool kPlainQueries = C::kMath == C::kQ&& C::kKeys != fp8_rows;

// Two latent values of q as C::kMath. Keys of fp8_rows carry kKeyFactor, as f16 has only five bits
// of exponent; queries are divided by it.
template <class C>
__device__ __forceinline__ uint32_t query_pair(uint32_t pair) {
  if constexpr (kPlainQueries<C>) return pair;
  constexpr float kFactor = C::kKeys == fp8_rows ? 1 / kKeyFactor : 1;
  return pack<C::kMath>(to_float<C::kQ>(static_cast<uint16_t>(pair)) * kFactor,
                        to_float<C::kQ>(static_cast<uint16_t>(pair >> 16)) * kFactor);
}

// The scale of a plain e4m3 cache, which is applied to scores and outputs instead of keys; 1
// elsewhere.
template <class C>
__device__ __forceinline__ float cache_scale(const MlaDecodeParams& params) {
  return C::kKeys == e4m3 && params.cache_scale ? *params.cache_scale : 1;
}
// The factor of sums of weighted values.
template <class C>
__device__ __forceinline__ float value_scale(const MlaDecodeParams& params) {
  return C::kKeys == fp8_rows ? 1 / kKeyFactor : cache_scale<C>(params);
}

// Four e4m3 values of `word` as f16, times both halves of `scale` if kScaled.
template <bool kScaled>
__device__ __forceinline__ void widen_e4m3(uint32_t word, uint32_t scale, uint32_t& low,
                                           uint32_t& high) {
  widen_four_e4m3(word, low, high);
  if constexpr (kScaled) {
    low = multiply_f16(low, scale);
    high = multiply_f16(high, scale);
  }
}

}  // namespace fovea::kernels::cuda
