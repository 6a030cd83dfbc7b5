// SPDX-License-Identifier: Apache-2.0
// From fp8 codes to 16-bit values, exactly. In integers where it says pair or chunk, for sm_80 has
// no instruction for it; a stored NaN of e4m3 then becomes 480.
#pragma once

#include "kernels/cuda/common/e4m3.cuh"
#include "kernels/cuda/common/ptx.cuh"

namespace fovea::kernels::cuda {

constexpr uint32_t kMinusZeroPair = 0x80008000;  // x + -0 is x, whatever the sign of x

// Bytes 2 * kHigh and the next of `word`. The sign goes to the top, exponent and mantissa to the
// lowest bits of theirs; a product with a power of two repairs the exponent's bias.
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

// Eight values.
template <Type kFrom, Type kTo>
__device__ __forceinline__ uint4 widen_chunk(uint32_t first, uint32_t second) {
  return {widen_pair<kFrom, kTo, false>(first), widen_pair<kFrom, kTo, true>(first),
          widen_pair<kFrom, kTo, false>(second), widen_pair<kFrom, kTo, true>(second)};
}

// Eight values of e4m3 as f16 in few instructions; kScaled: times `scale`, a pair of the same f16,
// rounded once.
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
