// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cmath>

// clang-format off: device code needs the names of the first.
#include "emulation/cuda.h"
#include "kernels/cuda/common/near_cap.cuh"
// clang-format on

namespace fovea::kernels::cuda {
namespace {

// Products of fp8 codes have scales far from 1: inner = scale / cap, times those of q and k.
TEST(NearCap, IsTanhWhateverTheScale) {
  const float outer = 50 * 1.4426950408889634f;
  for (const float inner : {1e-12f, 1.8e-7f, 1.8e-5f, 1e-3f, 0.5f, 3.1e3f, 1e9f}) {
    const NearCap cap = near_cap(inner, outer);
    EXPECT_EQ(cap(0), 0) << "inner " << inner;
    for (int i = -1000; i <= 1000; ++i) {
      const float x = kNearTanh * static_cast<float>(i) / 1000 / inner;
      const double want = outer * std::tanh(static_cast<double>(inner) * x);
      EXPECT_NEAR(cap(x), want, 5e-7 * std::fabs(want)) << "inner " << inner << ", x " << x;
    }
  }
}

}  // namespace
}  // namespace fovea::kernels::cuda
