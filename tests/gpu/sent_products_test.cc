// SPDX-License-Identifier: Apache-2.0
// Products that send their outputs to the other ranks as they store them. Skipped without a GPU.
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "gpu/architectures.h"
#include "gpu/rank_inbox.h"
#include "kernels/cuda/portable/skinny_gemm/launch.h"
#include "kernels/cuda/sm90/narrow_gemm/launch.h"
#include "support/bf16_noise.h"
#include "support/device_array.h"
#include "support/gpu_kernel_test.h"

namespace fovea::kernels::cuda {
namespace {

using test::bf16_noise;
using test::to_device;
using test::to_host;

constexpr int32_t kN = 144, kK = 640;
constexpr int kRanks = 3, kOwn = 1;

class SentProducts : public test::GpuKernelTest<::testing::Test> {
 protected:
  using Run = std::function<void(const SkinnyGemmParams& params)>;

  // Every other rank gets the stored values in the box of the turn, which the product leaves.
  static void check(int32_t rows, const Run& run) {
    const size_t count = static_cast<size_t>(rows) * kN;
    const auto weight = to_device(bf16_noise(size_t{kN} * kK, 3));
    const auto x = to_device(bf16_noise(static_cast<size_t>(rows) * kK, 11));
    const auto bias = to_device(std::vector<float>(kN, 0.5f));
    for (const uint32_t turn : {0u, 2u}) {
      SCOPED_TRACE(testing::Message() << rows << " rows, turn " << turn);
      test::Inbox inbox(kRanks, kOwn, static_cast<int64_t>(count));
      inbox.set_turn(turn);
      const auto out = to_device(std::vector<float>(count, -1));
      SkinnyGemmParams params{};
      params.x = x.data();
      params.weight = weight.data();
      params.bias = bias.data();
      params.out = out.data();
      params.x_stride = params.weight_stride = params.k = kK;
      params.out_stride = params.n = kN;
      params.rows = rows;
      params.out_is_f32 = 1;
      run(params);
      const auto alone = to_host<uint32_t>(out, count);
      params.boxes = inbox.boxes();
      run(params);
      EXPECT_EQ(to_host<uint32_t>(out, count), alone);
      for (const int other : {0, 2}) {
        EXPECT_EQ(inbox.sent(static_cast<int>(turn), other, count), alone) << other;
      }
      EXPECT_EQ(inbox.kept(static_cast<int>(turn)), 0) << "in the own inbox";
      EXPECT_EQ(inbox.counters().turn, turn);
    }
  }
};

TEST_F(SentProducts, OfAFewRows) {
  const SkinnyProducts products(context->info().sm, *store);
  for (const int32_t rows : {1, 7}) {
    for (size_t variant = 0; variant < SkinnyProducts::kStages.size(); ++variant) {
      check(rows, [&](const SkinnyGemmParams& params) {
        ASSERT_TRUE(SkinnyProducts::serves(params));
        products.run(params, variant, nullptr);
        gpu::synchronize(nullptr);
      });
    }
  }
}

// Narrow products, whose tiles several blocks may share.
TEST_F(SentProducts, OfUpTo128Rows) {
  if (context->info().sm != gpu::kHopper) GTEST_SKIP() << "the GPU is not sm_90";
  const NarrowProducts products(context->info().sm, *store);
  for (const int32_t rows : {9, 50, 64, 119}) {
    for (const NarrowProducts::Division& division : NarrowProducts::kDivisions) {
      check(rows, [&](const SkinnyGemmParams& params) {
        ASSERT_TRUE(products.computes(params));
        products.run(params, division, nullptr);
        gpu::synchronize(nullptr);
      });
    }
  }
}

}  // namespace
}  // namespace fovea::kernels::cuda
