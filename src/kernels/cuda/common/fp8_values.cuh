// SPDX-License-Identifier: Apache-2.0
// From e4m3 codes to 16-bit values, exactly, in integers: sm_80 has no instruction for it. A stored NaN
// becomes 480.
#pragma once

#include "kernels/cuda/common/ptx.cuh"

namespace fovea::kernels::cuda {

constexpr uint32_t kMinusZeroPair = 0x80008000;  // x + -0 is x, whatever the sign of x

// Bytes 2 * kHigh and the next of `word`. The sign goes to the top, exponent and mantissa to the lowest
// bits of theirs; a product with a power of two repairs the exponent's bias.
template <Type kTo, bool kHigh>
__device__ __forceinline__ uint32_t widen_pair(uint32_t word) {
  const uint32_t wide = permute_bytes<kHigh ? 0xb3a2 : 0x9180>(word);  // 16 bits each, the sign repeated
  if constexpr (kTo == bf16) {
    constexpr uint32_t kTwoTo120 = 0x7b807b80;
    return multiply_add_pair<bf16>((wide << 4) & 0x87f087f0u, kTwoTo120, kMinusZeroPair);
  } else {
    constexpr uint32_t kTwoTo8 = 0x5c005c00;
    return multiply_add_pair<f16>((wide << 7) & 0xbf80bf80u, kTwoTo8, kMinusZeroPair);
  }
}

// Eight values; kScaled: times `scale`, which is the sum of two bf16, so that products are rounded once
// but for 2^-17 of them.
template <Type kTo, bool kScaled>
__device__ __forceinline__ uint4 widen_chunk(uint32_t first, uint32_t second, float scale) {
  uint32_t words[4] = {widen_pair<kTo, false>(first), widen_pair<kTo, true>(first),
                       widen_pair<kTo, false>(second), widen_pair<kTo, true>(second)};
  if constexpr (kScaled) {
    static_assert(kTo == bf16);
    const uint32_t high = pack<bf16>(scale, scale);
    const float rest = scale - __uint_as_float(high << 16);
    const uint32_t low = pack<bf16>(rest, rest);
#pragma unroll
    for (uint32_t& word : words) {
      const uint32_t added = multiply_add_pair<bf16>(word, low, kMinusZeroPair);
      word = multiply_add_pair<bf16>(word, high, added);
    }
  }
  return {words[0], words[1], words[2], words[3]};
}

}  // namespace fovea::kernels::cuda
