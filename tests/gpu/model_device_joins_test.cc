// SPDX-License-Identifier: Apache-2.0
// Operations that a GPU computes in one kernel and the CPU in several.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "gpu/model_devices.h"

namespace fovea {
namespace {

// Heads of q are normed and rotated, heads of k normed with other weights. A set without steps is
// left alone.
TEST_F(ModelDevices, PrepareTwoSetsOfHeadsAlike) {
  constexpr int32_t kRows = 7, kHeads = 5, kKeyHeads = 3, kDim = 64, kPositions = 100;
  constexpr int32_t kWidth = (kHeads + kKeyHeads) * kDim;
  const kernels::RopeSpec spec{.rotary_dim = kDim};
  const std::vector<float> x = random(size_t{kRows} * kWidth), q = random(kDim), k = random(kDim);
  const std::vector<int32_t> positions = random_ints(kRows, kPositions);
  for (const bool has_first : {true, false}) {
    expect_same(
        DType::bf16, kDim,
        [&](Side& side) {
          kernels::RopeTable table = make_rope_table(spec, kPositions);
          kernels::RopeTableView view = table.view();
          view.cos = side->place(table.cos).data();
          view.sin = side->place(table.sin).data();
          HeadSteps first, second;
          if (has_first) {
            first.norm = {side->place(q), 1e-6f, false};
            first.rotary.table = &view;
          }
          second.norm = {side->place(k), 1e-6f, false};
          const Rows rows = side.activations(x, kWidth);
          side->prepare_head_sets(
              {first, as_heads(rows, kDim), kHeads},
              {second, as_heads(from_column(rows, kHeads * kDim), kDim), kKeyHeads}, kRows, kDim,
              side.ints(positions));
          return side.read(rows, x.size());
        },
        has_first ? "two sets" : "the second set");
  }
}

// The GPU joins the residual step to the products around it.
TEST_F(ModelDevices, JoinNormsToProductsAlike) {
  constexpr int32_t kDim = 384, kIn = 256, kOut = 48;
  for (const int32_t rows : {1, 6, 8, 20, 64}) {
    const std::vector<float> x = random(static_cast<size_t>(rows) * kDim);
    const std::vector<float> in = random(static_cast<size_t>(rows) * kIn), norm = random(kDim);
    const std::vector<float> first = random(size_t{kDim} * kIn, 0.1f), bias = random(kDim);
    const std::vector<float> second = random(size_t{kDim} * kOut, 0.1f);
    const auto count = static_cast<size_t>(rows) * kOut;
    expect_same(
        DType::bf16, kOut,
        [&](Side& side) {
          const Linear before = side.linear(first, kDim, kIn, false, bias);
          const Linear after = side.linear(second, kOut, kDim, false);
          const Rows branch = side.floats(std::vector<float>(x.size()), kDim);
          const Rows out = side.floats(std::vector<float>(count), kOut);
          ResidualStep step;
          step.x = side.floats(x, kDim).floats();
          step.branch_factor = 0.5f;
          step.norm = {side->place(norm), 1e-5f, false};
          step.normed = side.activations(std::vector<float>(x.size()), kDim);
          step.rows = rows;
          step.dim = kDim;
          EXPECT_EQ(side->joins_norms(before, rows),
                    side->kind() == DeviceKind::cuda && (rows <= 8 || side->sm() == 90));
          if (side->joins_norms(before, rows)) {
            float* const squares =
                side.floats(std::vector<float>(static_cast<size_t>(rows * sums_of_squares(kDim))),
                            1)
                    .floats();
            EXPECT_TRUE(side->joined_linear(before, {.after = step, .squares = squares},
                                            side.activations(in, kIn), {}, rows));
            EXPECT_TRUE(side->joined_linear(after, {.before = {squares, step.norm.epsilon}},
                                            step.normed, out, rows));
          } else {
            side->linear(before, side.activations(in, kIn), branch, rows);
            step.branch = branch.floats();
            side->residual(step);
            side->linear(after, step.normed, out, rows);
          }
          return side.read(out, count);
        },
        std::to_string(rows) + " rows");
  }
}

}  // namespace
}  // namespace fovea
