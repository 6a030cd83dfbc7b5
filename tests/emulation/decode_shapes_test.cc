// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <utility>

// clang-format off: device code needs the names of the first header.
#include "emulation/cuda.h"
#include "kernels/cuda/sm90/decode/kernel.cuh"
// clang-format on

namespace fovea::kernels::cuda {
namespace {

constexpr int kStep = 16, kMaxHeadDim = 256;  // steps of head dims that launch.cc requests

template <int kDim, int kDimV, Type kQuery, Type kCache>
int counted_warps() {
  using Narrow = Config<kDim, kDimV, 8, kQuery, kCache>;
  int warps = Narrow::kWarps + (sizeof(BoxCopier<Narrow>) > 0 ? 0 : 1);
  if constexpr (kDim + kDimV <= 320) {
    using Wide = Config<kDim, kDimV, 16, kQuery, kCache>;
    warps += Wide::kWarps + (sizeof(BoxCopier<Wide>) > 0 ? 0 : 1);
  }
  return warps;
}

// Values are no wider than keys.
template <int kDim, Type kQuery, Type kCache, int... kPlaces>
int counted_values(std::integer_sequence<int, kPlaces...>) {
  return (counted_warps<kDim, (kPlaces + 1) * kStep, kQuery, kCache>() + ...);
}
template <Type kQuery, Type kCache, int... kPlaces>
int counted(std::integer_sequence<int, kPlaces...>) {
  return (counted_values<(kPlaces + 1) * kStep, kQuery, kCache>(
              std::make_integer_sequence<int, kPlaces + 1>()) +
          ...);
}

// Kernels of other dims than the baked ones are compiled where they are needed. The instantiations
// here assert that the stages and boxes of all of them fit.
TEST(DecodeShapes, HaveStagesAndBoxesThatFit) {
  const auto places = std::make_integer_sequence<int, kMaxHeadDim / kStep>();
  EXPECT_GT((counted<bf16, bf16>(places)), 0);
  EXPECT_GT((counted<bf16, f8e4m3>(places)), 0);
}

}  // namespace
}  // namespace fovea::kernels::cuda
