// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cmath>

// clang-format off: device code needs the names of the first header.
#include "emulation/cuda.h"
#include "kernels/cuda/common/near_cap.cuh"
// clang-format on

namespace fovea::kernels::cuda {
namespace {

constexpr float kCaps[] = {1e-3f, 1, 30, 50, 1e4f};

// Returns the largest relative error for scores from -limit to limit.
template <typename Capped>
void expect_tanh(float cap, float from, float to, Capped capped) {
  for (int i = -1000; i <= 1000; ++i) {
    const float part = static_cast<float>(i) / 1000;
    const float inner = std::copysign(from + (to - from) * std::fabs(part), part);
    const double score =
        static_cast<double>(inner) * kNearTanh / kNearInner;  // in units of the cap
    const double want = static_cast<double>(cap) * kLog2E * std::tanh(score);
    EXPECT_NEAR(capped(inner), want, 5e-7 * std::fabs(want)) << "cap " << cap << ", " << score;
  }
}

TEST(NearCap, IsTanhWhereScoresAreNear) {
  for (const float cap : kCaps) {
    const NearCap near = near_cap(cap);
    // A score of kNearTanh caps is the first that does not count as near.
    EXPECT_NEAR(cap * kNearTanh * near.unit, kNearInner, 1e-6);
    expect_tanh(cap, 0, kNearInner, [&](float inner) {
      const float inners[2] = {inner, -inner};
      float scores[2];
      cap_near(near, inners, scores);
      EXPECT_EQ(scores[0], -scores[1]);
      return scores[0];
    });
  }
}

TEST(NearCap, IsTanhBeyond) {
  for (const float cap : kCaps) {
    const float outer = cap * kLog2E;
    expect_tanh(cap, kNearInner, 100, [&](float inner) { return cap_far(inner, outer); });
    EXPECT_EQ(cap_far(1e30f, outer), outer);
    EXPECT_EQ(cap_far(-1e30f, outer), -outer);
  }
}

}  // namespace
}  // namespace fovea::kernels::cuda
