// SPDX-License-Identifier: Apache-2.0
// Random numbers that depend on their place in a text only, for host and device code alike.
#pragma once

#ifdef __CUDACC_RTC__
#include "kernels/cuda/common/types.cuh"
#else
#include <cstdint>
#endif

namespace fovea::kernels {

// Returns a uniform number in [0, 1) with 53 bits: Philox4x32-10 (Salmon et al., SC 2011) with key
// `seed` and counter (position, draw). Draws of one position are independent.
inline double uniform_at(uint64_t seed, uint64_t position, uint32_t draw = 0) {
  constexpr uint64_t kMultiplier0 = 0xD2511F53, kMultiplier1 = 0xCD9E8D57;
  constexpr uint32_t kWeyl0 = 0x9E3779B9, kWeyl1 = 0xBB67AE85;
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  uint32_t c0 = static_cast<uint32_t>(position), c1 = static_cast<uint32_t>(position >> 32);
  uint32_t c2 = draw, c3 = 0;
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = kMultiplier0 * c0;
    const uint64_t product1 = kMultiplier1 * c2;
    c0 = static_cast<uint32_t>(product1 >> 32) ^ c1 ^ key0;
    c1 = static_cast<uint32_t>(product1);
    c2 = static_cast<uint32_t>(product0 >> 32) ^ c3 ^ key1;
    c3 = static_cast<uint32_t>(product0);
    key0 += kWeyl0;
    key1 += kWeyl1;
  }
  const uint64_t bits = static_cast<uint64_t>(c1) << 32 | c0;
  return static_cast<double>(bits >> 11) * 0x1p-53;
}

}  // namespace fovea::kernels
