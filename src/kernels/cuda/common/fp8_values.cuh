// SPDX-License-Identifier: Apache-2.0
// Exact conversions from fp8 codes to 16-bit values. widen_pair() and widen_chunk() compute in
// integers because sm_80 has no instruction for this; they turn a stored NaN of e4m3 into 480.
#pragma once

#include "kernels/cuda/common/e4m3.cuh"
#include "kernels/cuda/common/ptx.cuh"

namespace fovea::kernels::cuda {

constexpr uint32_t kMinusZeroPair = 0x80008000;  // x + -0 is x, whatever the sign of x

// Converts bytes 2 * kHigh and 2 * kHigh + 1 of `word`. The sign moves to the top bit, exponent and
// mantissa to the lowest bits of their fields; a product with a power of two corrects the bias of
// the exponent.
template <Type kFrom, Type kTo, bool kHigh>
__device__ __forceinline__ uint32_t widen_pair(uint32_t word) {
  const uint32_t wide =
      permute_bytes < kHigh ? 0xb3a2 : 0x9180 > (word);  // 16 bits each, the sign repeated
  if constexpr (kFrom == f8e4m3 && kTo == bf16) {
    constexpr uint32_t kTwoTo120 = 0x7b807b80;
    return multiply_add_pair<bf16>((wide << 4) & 0x87f087f0u, kTwoTo120, kMinusZeroPair);
  } else if constexpr (kFrom == f8e4m3) {
    constexpr uint32_t kTwoTo8 = 0x5c005c00;
    return multiply_add_pair<f16>((wide << 7) & 0xbf80bf80u, kTwoTo8, kMinusZeroPair);
  } else if constexpr (kTo == bf16) {
    constexpr uint32_t kTwoTo112 = 0x77807780;
    return multiply_add_pair<bf16>((wide << 5) & 0x8fe08fe0u, kTwoTo112, kMinusZeroPair);
  } else {
    return (wide << 8) & 0xff00ff00u;
  }
}

// Converts eight values.
template <Type kFrom, Type kTo>
__device__ __forceinline__ uint4 widen_chunk(uint32_t first, uint32_t second) {
  return {widen_pair<kFrom, kTo, false>(first), widen_pair<kFrom, kTo, true>(first),
          widen_pair<kFrom, kTo, false>(second), widen_pair<kFrom, kTo, true>(second)};
}

// Converts eight e4m3 values to f16 in few instructions. With kScaled it multiplies them by
// `scale`, which holds the same f16 twice, and rounds once.
template <bool kScaled>
__device__ __forceinline__ uint4 widen_to_f16(uint32_t first, uint32_t second, uint32_t scale) {
#if __CUDA_ARCH__ >= 890
  uint32_t words[4] = {widen_e4m3(first), widen_e4m3(first >> 16), widen_e4m3(second),
                       widen_e4m3(second >> 16)};
#else
  uint32_t words[4] = {widen_pair<f8e4m3, f16, false>(first), widen_pair<f8e4m3, f16, true>(first),
                       widen_pair<f8e4m3, f16, false>(second),
                       widen_pair<f8e4m3, f16, true>(second)};
#endif
  if constexpr (kScaled) {
#pragma unroll
    for (uint32_t& word : words) word = multiply_add_pair<f16>(word, scale, kMinusZeroPair);
  }
  return {words[0], words[1], words[2], words[3]};
}

}  // namespace fovea::kernels::cuda
