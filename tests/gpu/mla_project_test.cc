// SPDX-License-Identifier: Apache-2.0
// sm90/mla_project by itself: keys and values of every head against fp64, copied rotary keys, and
// nothing else written.
#include "kernels/cuda/mla_project.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "core/float_types.h"
#include "core/rounding.h"
#include "support/bf16_noise.h"
#include "support/device_array.h"
#include "support/expect_close.h"
#include "support/gpu_kernel_test.h"

namespace fovea::kernels::cuda {
namespace {

using test::bf16_noise;
using test::to_device;
using test::to_host;

constexpr uint16_t kUntouched = 0xABCD;
constexpr int32_t kRope = 72;        // columns after a head's keys that another kernel writes
constexpr int32_t kStoredRows = 64;  // rows are written up to a multiple of this

struct Shape {
  int32_t heads, rank, nope_dim, v_dim, rows, live;
};

using Case = std::tuple<Shape, bool, bool>;  // gathers; for a GPU of few multiprocessors
class MlaProjectTest : public test::GpuKernelTest<::testing::TestWithParam<Case>, 90> {};

// Expects the dot product of a row of latents and a row of weights.
void expect_product(uint16_t got, std::span<const uint16_t> latent, const uint16_t* weights) {
  double sum = 0;
  for (size_t i = 0; i < latent.size(); ++i) {
    sum += double{bf16_to_float(latent[i])} * bf16_to_float(weights[i]);
  }
  ASSERT_TRUE(test::is_near(bf16_to_float(got), sum, std::abs(sum) / 256 + 1e-3));
}

bool is_untouched(std::span<const uint16_t> values) {
  return std::ranges::all_of(values, [](uint16_t value) { return value == kUntouched; });
}

TEST_P(MlaProjectTest, KeysAndValuesOfEveryHead) {
  const Shape& shape = std::get<0>(GetParam());
  const bool gathers = std::get<1>(GetParam()), few_blocks = std::get<2>(GetParam());
  const auto heads = static_cast<size_t>(shape.heads), rank = static_cast<size_t>(shape.rank),
             nope = static_cast<size_t>(shape.nope_dim), v_dim = static_cast<size_t>(shape.v_dim),
             rows = static_cast<size_t>(shape.rows), width = nope + kRope, row_dim = rank + kRope;
  const auto latents = bf16_noise(rows * row_dim, 11), w_uk = bf16_noise(heads * nope * rank, 12),
             w_uv = bf16_noise(heads * v_dim * rank, 13);
  const auto latents_device = to_device(latents), w_uk_device = to_device(w_uk),
             w_uv_device = to_device(w_uv);
  const auto keys = to_device(std::vector<uint16_t>(rows * heads * width, kUntouched));
  const auto values = to_device(std::vector<uint16_t>(rows * heads * v_dim, kUntouched));
  const auto live = to_device(std::vector<int32_t>{shape.live});
  // Gathered: the rows in reverse order, and some zeros.
  const auto place = [&](size_t row) { return gathers ? rows - 1 - row : row; };
  const auto is_zero = [&](size_t row) { return gathers && row % 37 == 34; };
  std::vector<int64_t> offsets;
  for (size_t row = 0; row < rows; ++row) {
    offsets.push_back(is_zero(row) ? -1 : static_cast<int64_t>(place(row) * row_dim));
  }
  const auto offsets_device = to_device(offsets);
  const auto rotary = to_device(std::vector<uint16_t>(rows * kRope, kUntouched));
  const MlaProject project({.rank = shape.rank,
                            .nope_dim = shape.nope_dim,
                            .v_dim = shape.v_dim,
                            .sm = context->info().sm,
                            .multiprocessors = few_blocks ? 4 : context->info().cores,
                            .gathers = gathers},
                           *store);
  project.run({.latents = latents_device.data(),
               .latents_row_stride = static_cast<int64_t>(row_dim),
               .offsets = offsets_device.data<int64_t>(),
               .rotary = rotary.data(),
               .rope_dim = kRope,
               .w_uk = w_uk_device.data(),
               .w_uv = w_uv_device.data(),
               .w_uk_head_stride = int64_t{shape.nope_dim} * shape.rank,
               .w_uv_head_stride = int64_t{shape.v_dim} * shape.rank,
               .keys = keys.data(),
               .keys_token_stride = static_cast<int64_t>(heads * width),
               .keys_head_stride = static_cast<int64_t>(width),
               .values = values.data(),
               .values_token_stride = static_cast<int64_t>(heads * v_dim),
               .values_head_stride = static_cast<int64_t>(v_dim),
               .live_rows = live.data<int32_t>(),
               .rows = shape.rows,
               .heads = shape.heads},
              nullptr);
  gpu::synchronize(nullptr);
  const auto got_keys = to_host<uint16_t>(keys, rows * heads * width);
  const auto got_values = to_host<uint16_t>(values, rows * heads * v_dim);
  const auto got_rotary = to_host<uint16_t>(rotary, rows * kRope);
  for (size_t i = 0; i < got_rotary.size(); ++i) {
    const size_t row = i / kRope;
    const bool copied = gathers && row < static_cast<size_t>(shape.live) && !is_zero(row);
    ASSERT_EQ(got_rotary[i], copied ? latents[place(row) * row_dim + rank + i % kRope] : kUntouched)
        << row;
  }

  const size_t last_written = round_up(static_cast<size_t>(shape.live), size_t{kStoredRows});
  for (size_t row = 0; row < rows; ++row) {
    for (size_t head = 0; head < heads; ++head) {
      SCOPED_TRACE("row " + std::to_string(row) + " head " + std::to_string(head));
      const size_t at = row * heads + head;
      const size_t first = row < last_written ? nope : 0;
      ASSERT_TRUE(is_untouched(std::span(got_keys).subspan(at * width + first, width - first)));
      ASSERT_EQ(row >= last_written, got_values[at * v_dim] == kUntouched);
      // Every column of some rows.
      if (row >= static_cast<size_t>(shape.live) || (row % 37 != 5 && row % 37 != 34)) continue;
      const std::span latent(&latents[place(row) * row_dim], is_zero(row) ? 0 : rank);
      for (size_t column = 0; column < nope; ++column) {
        expect_product(got_keys[at * width + column], latent, &w_uk[(head * nope + column) * rank]);
      }
      for (size_t column = 0; column < v_dim; ++column) {
        expect_product(got_values[at * v_dim + column], latent,
                       &w_uv[(head * v_dim + column) * rank]);
      }
    }
  }
}

std::string name_of(const ::testing::TestParamInfo<Case>& test) {
  const auto& [shape, gathers, few_blocks] = test.param;
  const int64_t size = int64_t{shape.rows} * shape.heads * shape.rank;
  return (size < 500'000 ? "small_" : "large_") + std::to_string(shape.rank) + "_" +
         std::to_string(shape.nope_dim) + (gathers ? "_gathered" : "") +
         (few_blocks ? "_in_turns" : "");
}

// With few blocks, all blocks but the last take tiles of both sides in pairs. With many blocks, the
// small ones take tiles of one side.
INSTANTIATE_TEST_SUITE_P(Shapes, MlaProjectTest,
                         ::testing::Combine(::testing::Values(Shape{3, 512, 128, 128, 300, 170},
                                                              Shape{2, 192, 72, 24, 130, 130},
                                                              Shape{1, 128, 64, 32, 1500, 1400},
                                                              Shape{16, 512, 128, 128, 3000, 2777},
                                                              Shape{5, 256, 64, 128, 700, 1},
                                                              Shape{4, 128, 128, 128, 200, 0},
                                                              Shape{6, 192, 128, 64, 100, 90}),
                                            ::testing::Bool(), ::testing::Bool()),
                         name_of);

}  // namespace
}  // namespace fovea::kernels::cuda
