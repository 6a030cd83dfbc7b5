// SPDX-License-Identifier: Apache-2.0
// Rotary positions: the tables of every scaling against their formulas, and the rotation itself.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "fovea/error.h"
#include "kernels/layer_ops.h"
#include "support/random_values.h"

namespace fovea::kernels {
namespace {

using test::random_values;

// Hugging Face's frequencies of gpt-oss: dim 64, theta 150000, factor 32 over 4096, betas 32 and 1,
// not truncated. Written in the form of the paper: rotations over the original context.
TEST(Rope, YarnBlendsBetweenTheBetas) {
  RopeSpec spec;
  spec.rotary_dim = 64;
  spec.theta = 150000;
  spec.scaling = RopeScaling::yarn;
  spec.factor = 32;
  spec.original_max_positions = 4096;
  spec.truncate = false;
  const RopeTable table = make_rope_table(spec, 2);
  const double attention = 0.1 * std::log(32.0) + 1;
  const double low = 64 * std::log(4096 / (32 * 2 * M_PI)) / (2 * std::log(150000.0));
  const double high = 64 * std::log(4096 / (2 * M_PI)) / (2 * std::log(150000.0));
  ASSERT_NEAR(low, 8.09, 0.01);
  ASSERT_NEAR(high, 17.40, 0.01);
  for (int i = 0; i < 32; ++i) {
    const double plain = std::pow(150000.0, -i / 32.0);
    const double slow = std::min(1.0, std::max(0.0, (i - low) / (high - low)));
    const double frequency = plain * (1 - slow) + plain / 32 * slow;
    EXPECT_FLOAT_EQ(table.cos[i], static_cast<float>(attention));  // position 0
    EXPECT_NEAR(table.sin[32 + i], attention * std::sin(frequency), 2e-7) << i;
    EXPECT_NEAR(table.cos[32 + i], attention * std::cos(frequency), 2e-7) << i;
  }
}

TEST(Rope, YarnTruncationAndMscale) {
  RopeSpec spec;
  spec.rotary_dim = 64;
  spec.scaling = RopeScaling::yarn;
  spec.factor = 40;
  spec.original_max_positions = 4096;
  spec.mscale = 1;
  spec.mscale_all_dim = 1;
  const RopeTable table = make_rope_table(spec, 2);
  // DeepSeek-V3: the bounds 10.47 and 22.51 become 10 and 23; the two mscales cancel.
  EXPECT_NEAR(table.sin[32 + 10], std::sin(std::pow(10000.0, -10 / 32.0)), 1e-7);
  EXPECT_NEAR(table.sin[32 + 23], std::sin(std::pow(10000.0, -23 / 32.0) / 40), 1e-9);
  const double half = 1 - 3 / 13.0;
  EXPECT_NEAR(table.sin[32 + 13],
              std::sin(std::pow(10000.0, -13 / 32.0) * (half + (1 - half) / 40)), 1e-8);
  EXPECT_FLOAT_EQ(table.cos[0], 1.0f);
  spec.attention_factor = 1.25;
  EXPECT_FLOAT_EQ(make_rope_table(spec, 1).cos[0], 1.25f);
  EXPECT_DOUBLE_EQ(yarn_mscale(0.5, 1), 1);
  EXPECT_DOUBLE_EQ(yarn_mscale(40, 0.5), 1 + 0.05 * std::log(40.0));
}

TEST(Rope, LinearAndLlama3) {
  RopeSpec spec;
  spec.rotary_dim = 128;
  spec.theta = 500000;
  spec.scaling = RopeScaling::linear;
  spec.factor = 8;
  RopeTable table = make_rope_table(spec, 9);
  EXPECT_NEAR(table.sin[8 * 64], std::sin(1.0), 1e-7);
  spec.scaling = RopeScaling::llama3;
  spec.original_max_positions = 8192;
  table = make_rope_table(spec, 2);
  EXPECT_NEAR(table.sin[64], std::sin(1.0), 1e-7);  // short wavelength: unchanged
  const double slowest = std::pow(500000.0, -126 / 128.0);
  EXPECT_NEAR(table.sin[64 + 63], slowest / 8, 1e-12);
  // Between 1 and 4 rotations over 8192 positions the two frequencies blend.
  const double middle = std::pow(500000.0, -64 / 128.0);
  const double turns = 8192 * middle / (2 * M_PI);
  ASSERT_GT(turns, 1);
  ASSERT_LT(turns, 4);
  const double smooth = (turns - 1) / 3;
  EXPECT_NEAR(table.sin[64 + 32], std::sin(middle * ((1 - smooth) / 8 + smooth)), 1e-9);
}

class RopeLayouts : public testing::TestWithParam<RopeLayout> {};

TEST_P(RopeLayouts, RotatesPairsAndLeavesTheRest) {
  ThreadPool threads(2);
  constexpr int32_t kRows = 70, kHeads = 5, kDim = 48, kRotary = 32;
  RopeSpec spec;
  spec.rotary_dim = kRotary;
  const RopeTable table = make_rope_table(spec, 300);
  std::vector<float> x = random_values(kRows * kHeads * kDim, 4);
  const std::vector<float> before = x;
  std::vector<int32_t> positions(kRows);
  for (int32_t row = 0; row < kRows; ++row) positions[row] = (row * 37) % 300;
  RopeParams params;
  params.x = {x.data(), kHeads * kDim, kDim};
  params.table = table.view();
  params.layout = GetParam();
  params.positions = positions.data();
  params.rows = kRows;
  params.heads = kHeads;
  rope(params, threads);
  for (int32_t row = 0; row < kRows; ++row) {
    for (int32_t h = 0; h < kHeads; ++h) {
      const float* source = &before[(row * kHeads + h) * kDim];
      const float* actual = &x[(row * kHeads + h) * kDim];
      for (int32_t i = 0; i < kRotary / 2; ++i) {
        const bool split = GetParam() == RopeLayout::half_split;
        const int32_t a = split ? i : 2 * i, b = split ? i + kRotary / 2 : 2 * i + 1;
        const double angle = positions[row] * std::pow(10000.0, -2.0 * i / kRotary);
        EXPECT_NEAR(actual[a], source[a] * std::cos(angle) - source[b] * std::sin(angle), 1e-4);
        EXPECT_NEAR(actual[b], source[a] * std::sin(angle) + source[b] * std::cos(angle), 1e-4);
      }
      for (int32_t i = kRotary; i < kDim; ++i) EXPECT_EQ(actual[i], source[i]);
    }
  }
}
INSTANTIATE_TEST_SUITE_P(All, RopeLayouts,
                         testing::Values(RopeLayout::half_split, RopeLayout::interleaved));

TEST(Rope, RefusesPositionsOutsideTheTable) {
  ThreadPool threads(1);
  RopeSpec spec;
  spec.rotary_dim = 4;
  const RopeTable table = make_rope_table(spec, 8);
  std::vector<float> x(4);
  for (const int32_t position : {-1, 8}) {
    RopeParams params;
    params.x = {x.data(), 4, 4};
    params.table = table.view();
    params.positions = &position;
    params.rows = 1;
    EXPECT_THROW(rope(params, threads), Error) << position;
  }
}

}  // namespace
}  // namespace fovea::kernels
