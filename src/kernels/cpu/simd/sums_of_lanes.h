// SPDX-License-Identifier: Apache-2.0
// Sums across the lanes of four vectors at a time. For sources in kernels/cpu/simd only.
#pragma once

#include "kernels/cpu/simd/convert.h"

namespace fovea::kernels::cpu::FOVEA_ISA {
namespace {

#if HWY_TARGET != HWY_SCALAR
// Adds halves until four lanes are left.
template <typename D>
HWY_INLINE auto add_halves(D, hn::Vec<D> sums) {
  if constexpr (hn::MaxLanes(D()) == 4) {
    return sums;
  } else {
    const hn::Half<D> half;
    return add_halves(half, hn::Add(hn::LowerHalf(half, sums), hn::UpperHalf(half, sums)));
  }
}
#endif

// Sets to[i] to the sum of the lanes of vectors[i], for four vectors. The order of additions is
// fixed.
HWY_INLINE void store_sums_of_lanes(const F32* vectors, float* to) {
#if HWY_TARGET == HWY_SCALAR
  for (int32_t i = 0; i < 4; ++i) to[i] = hn::GetLane(vectors[i]);
#else
  // Within each block of four lanes, adds pairs and then all four, transposing on the way.
  const auto pairs = [](F32 a, F32 b) HWY_ATTR {
    return hn::Add(hn::InterleaveLower(kF32, a, b), hn::InterleaveUpper(kF32, a, b));
  };
  const hn::Repartition<uint64_t, F32Tag> d64;
  const auto first = hn::BitCast(d64, pairs(vectors[0], vectors[1]));
  const auto second = hn::BitCast(d64, pairs(vectors[2], vectors[3]));
  const F32 blocks = hn::Add(hn::BitCast(kF32, hn::InterleaveLower(d64, first, second)),
                             hn::BitCast(kF32, hn::InterleaveUpper(d64, first, second)));
  hn::StoreU(add_halves(kF32, blocks), hn::CappedTag<float, 4>(), to);
#endif
}

}  // namespace
}  // namespace fovea::kernels::cpu::FOVEA_ISA
