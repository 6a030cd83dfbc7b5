// SPDX-License-Identifier: Apache-2.0
// Products of up to 8 rows with the experts that they chose: correct by fp64 in every layout, with
// biases, gates, scales and partial tiles, in every division of k, and nothing written beyond the
// rows and columns of the output.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "core/float_types.h"
#include "kernels/cuda/sm90/skinny_experts/launch.h"
#include "support/bf16_noise.h"
#include "support/device_array.h"
#include "support/expect_close.h"
#include "support/gpu_kernel_test.h"

namespace fovea::kernels::cuda {
namespace {

using test::bf16_noise;
using test::to_device;
using test::to_host;

constexpr float kUntouched = 12352;  // representable in bf16
constexpr int32_t kPadding = 8;      // elements after each row of every operand

enum class Gates { separate, joined, alternating };

struct Shape {
  const char* name;
  ExpertProduct product;
  bool is_kn;
  int32_t n, k, experts, top_k;
  Gates gates = Gates::separate;
  bool has_bias = false;
  bool has_scale = true;
  bool adds = false;
};

float clamped_swiglu(float alpha, float limit, float gate, float up) {
  const float g = std::min(gate, limit), u = std::clamp(up, -limit, limit);
  return (u + 1) * g / (1 + std::exp(-alpha * g));
}

class SkinnyExpertsTest : public test::GpuKernelTest<::testing::TestWithParam<Shape>, 90> {
 protected:
  static constexpr float kAlpha = 1.702f, kLimit = 1.5f;

  void SetUp() override {
    GpuKernelTest::SetUp();
    if (IsSkipped()) return;
    products_.emplace(context->info().sm, *store);
    const Shape& shape = GetParam();
    matrices_ = is_gated() && shape.gates == Gates::separate ? 2 : 1;
    columns_ = is_gated() && matrices_ == 1 ? 2 * shape.n : shape.n;
    weight_stride_ = (shape.is_kn ? columns_ : shape.k) + kPadding;
    const size_t elements =
        static_cast<size_t>(weight_stride_) * static_cast<size_t>(shape.is_kn ? shape.k : columns_);
    std::vector<ExpertMatrix> table;
    for (int32_t i = 0; i < shape.experts * matrices_; ++i) {
      weights_.push_back(bf16_noise(elements, static_cast<uint32_t>(100 + i)));
      std::vector<float> bias;
      for (const uint16_t bits : bf16_noise(static_cast<size_t>(columns_), 500 + i)) {
        bias.push_back(bf16_to_float(bits));
      }
      memory_.push_back(to_device(weights_.back()));
      const void* const weight = memory_.back().data();
      memory_.push_back(to_device(bias));
      table.push_back({weight, shape.has_bias ? memory_.back().data<float>() : nullptr});
      biases_.push_back(shape.has_bias ? bias : std::vector<float>(bias.size()));
    }
    table_ = to_device(table);
  }

  bool is_gated() const { return GetParam().product == ExpertProduct::gated; }
  size_t x_stride() const { return static_cast<size_t>(GetParam().k + kPadding); }
  size_t out_stride() const { return static_cast<size_t>(GetParam().n + kPadding); }

  // The inputs of some rows. Row r of 8 has the same values whatever the rows before it.
  struct Inputs {
    int32_t rows = 0;
    std::vector<int32_t> ids;
    std::vector<float> scale;
    std::vector<uint16_t> x;
  };
  Inputs inputs() const {
    const Shape& shape = GetParam();
    Inputs made{.rows = kMaxSkinnyRows};
    for (int32_t row = 0; row < made.rows; ++row) {
      for (int32_t i = 0; i < shape.top_k; ++i) {
        // The experts of a row differ, and expert 1 is never chosen.
        const int32_t id = (row * 37 + i * 23 + row * i % 2) % (shape.experts - 1);
        const auto own = made.ids.end() - i;
        int32_t free = id;
        while (std::find(own, made.ids.end(), free == 1 ? shape.experts - 1 : free) !=
               made.ids.end()) {
          free = (free + 1) % (shape.experts - 1);
        }
        made.ids.push_back(free == 1 ? shape.experts - 1 : free);
        made.scale.push_back(0.5f + 0.125f * static_cast<float>((row + i * 3) % 7));
      }
    }
    const int32_t x_rows = is_gated() ? made.rows : made.rows * shape.top_k;
    made.x = bf16_noise(static_cast<size_t>(x_rows) * x_stride(), 11);
    return made;
  }
  // Returns the inputs of `count` rows from `first` on.
  Inputs part(const Inputs& all, int32_t first, int32_t count) const {
    const int32_t top_k = GetParam().top_k;
    const int64_t x_rows = is_gated() ? 1 : top_k, stride = static_cast<int64_t>(x_stride());
    const auto cut = [&](const auto& values, int64_t width) {
      return std::vector(values.begin() + first * width, values.begin() + (first + count) * width);
    };
    return {count, cut(all.ids, top_k), cut(all.scale, top_k), cut(all.x, x_rows * stride)};
  }

  // Returns the rows of the output and one more, with their padding.
  std::vector<float> run(const Inputs& inputs, int32_t splits) const {
    const Shape& shape = GetParam();
    const auto x = to_device(inputs.x), ids = to_device(inputs.ids);
    const auto scale = to_device(inputs.scale), out = to_device(initial_bytes(inputs.rows));
    SkinnyExpertsParams params{};
    params.x = x.data();
    params.weights = table_.data<ExpertMatrix>();
    params.ids = ids.data<int32_t>();
    params.scale = shape.has_scale ? scale.data<float>() : nullptr;
    params.out = out.data();
    params.x_stride = static_cast<int64_t>(x_stride());
    params.out_stride = static_cast<int64_t>(out_stride());
    params.weight_stride = weight_stride_;
    params.rows = inputs.rows;
    params.top_k = shape.top_k;
    params.experts = shape.experts;
    params.matrices = matrices_;
    params.n = shape.n;
    params.k = shape.k;
    params.splits = splits;
    params.column_step = shape.gates == Gates::alternating ? 2 : 1;
    params.up_column = shape.gates == Gates::alternating ? 1
                       : shape.gates == Gates::joined    ? shape.n
                                                         : 0;
    params.activation = shape.gates == Gates::alternating ? kClampedSwiglu : kSilu;
    params.alpha = kAlpha;
    params.limit = kLimit;
    params.adds = shape.adds;
    EXPECT_TRUE(products_->serves(params, shape.is_kn));
    products_->run_divided(shape.product, params, shape.is_kn, nullptr);
    gpu::synchronize(nullptr);
    const size_t count = out_rows(inputs.rows) * out_stride();
    if (!is_gated()) return to_host<float>(out, count);
    std::vector<float> values;
    for (const uint16_t bits : to_host<uint16_t>(out, count)) values.push_back(bf16_to_float(bits));
    return values;
  }
  // Returns the output's rows, with one more.
  size_t out_rows(int32_t rows) const {
    return static_cast<size_t>(is_gated() ? rows * GetParam().top_k : rows) + 1;
  }
  std::vector<uint8_t> initial_bytes(int32_t rows) const {
    const size_t count = out_rows(rows) * out_stride();
    std::vector<uint8_t> bytes;
    for (size_t i = 0; i < count; ++i) {
      const float value = kUntouched;
      const uint16_t half = float_to_bf16(value);
      const auto* const from = is_gated() ? reinterpret_cast<const uint8_t*>(&half)
                                          : reinterpret_cast<const uint8_t*>(&value);
      bytes.insert(bytes.end(), from, from + (is_gated() ? sizeof(half) : sizeof(value)));
    }
    return bytes;
  }

  // Returns the product of a row of x and a column of an expert's matrix, and adds the bias.
  double sum(const Inputs& inputs, size_t x_row, int32_t expert, int32_t matrix, int32_t column,
             double scale) const {
    const auto which = static_cast<size_t>(expert * matrices_ + matrix);
    const auto stride = static_cast<size_t>(weight_stride_), c = static_cast<size_t>(column);
    double total = 0;
    for (size_t i = 0; i < static_cast<size_t>(GetParam().k); ++i) {
      const size_t at = GetParam().is_kn ? i * stride + c : c * stride + i;
      total += double{bf16_to_float(inputs.x[x_row * x_stride() + i])} *
               bf16_to_float(weights_[which][at]);
    }
    return total * scale + biases_[which][c];
  }
  double exact(const Inputs& inputs, size_t row, int32_t column) const {
    const Shape& shape = GetParam();
    const auto top_k = static_cast<size_t>(shape.top_k);
    const auto scale = [&](size_t choice) {
      return shape.has_scale ? double{inputs.scale[choice]} : 1.0;
    };
    if (!is_gated()) {
      double total = shape.adds ? kUntouched : 0;
      for (size_t choice = row * top_k; choice < (row + 1) * top_k; ++choice) {
        total += scale(choice) * sum(inputs, choice, inputs.ids[choice], 0, column, 1);
      }
      return total;
    }
    const bool alternates = shape.gates == Gates::alternating;
    const int32_t gate_column = alternates ? 2 * column : column;
    const int32_t up_column = alternates                     ? gate_column + 1
                              : shape.gates == Gates::joined ? shape.n + column
                                                             : column;
    const auto rounded = [&](int32_t matrix, int32_t at) {
      return bf16_to_float(float_to_bf16(
          static_cast<float>(sum(inputs, row / top_k, inputs.ids[row], matrix, at, scale(row)))));
    };
    const float gate = rounded(0, gate_column), up = rounded(matrices_ - 1, up_column);
    return alternates ? clamped_swiglu(kAlpha, kLimit, gate, up)
                      : gate / (1 + std::exp(-gate)) * up;
  }

  std::optional<ExpertProducts> products_;
  int32_t matrices_ = 0, columns_ = 0, weight_stride_ = 0;
  std::vector<std::vector<uint16_t>> weights_;
  std::vector<std::vector<float>> biases_;
  std::vector<gpu::DeviceBuffer> memory_;
  gpu::DeviceBuffer table_;
};

TEST_P(SkinnyExpertsTest, EveryDivisionIsRight) {
  const Inputs all = inputs();
  for (int32_t splits = 1; splits <= kMaxSkinnySplits; ++splits) {
    const int32_t rows = splits == 1 ? kMaxSkinnyRows : 2 * splits - 3;
    SCOPED_TRACE("splits " + std::to_string(splits) + ", rows " + std::to_string(rows));
    const Inputs some = part(all, 0, rows);
    const std::vector<float> out = run(some, splits);
    for (size_t row = 0; row < out_rows(rows); ++row) {
      for (size_t i = 0; i < out_stride(); ++i) {
        const float got = out[row * out_stride() + i];
        const auto column = static_cast<int32_t>(i);
        if (row + 1 == out_rows(rows) || column >= GetParam().n) {
          ASSERT_EQ(got, kUntouched) << row << ", " << column;
          continue;
        }
        const double want = exact(some, row, column);
        const double limit = is_gated()        ? std::abs(want) / 32 + 0.05
                             : GetParam().adds ? 4e-3
                                               : 1e-3;
        ASSERT_TRUE(test::is_near(got, want, limit)) << row << ", " << column;
      }
    }
  }
}

// Other rows, with other experts, do not change a row.
TEST_P(SkinnyExpertsTest, ARowIsTheSameAmongOthers) {
  const Inputs all = inputs();
  for (const int32_t splits : {1, 3}) {
    const std::vector<float> together = run(all, splits);
    for (int32_t row = 0; row < kMaxSkinnyRows; row += 3) {
      const std::vector<float> alone = run(part(all, row, 1), splits);
      const size_t count = (out_rows(1) - 1) * out_stride();
      for (size_t i = 0; i < count; ++i) {
        ASSERT_EQ(alone[i], together[static_cast<size_t>(row) * count + i])
            << "splits " << splits << ", row " << row << ", element " << i;
      }
    }
  }
}

TEST_P(SkinnyExpertsTest, ServesWhatItComputes) {
  SkinnyExpertsParams good{};
  good.rows = 2;
  good.top_k = 3;
  good.experts = 12;
  good.matrices = good.column_step = 1;
  good.n = 64;
  good.k = good.weight_stride = 96;
  good.x_stride = good.out_stride = 96;
  EXPECT_TRUE(products_->serves(good, GetParam().is_kn));
  const auto refused = [&](auto change) {
    SkinnyExpertsParams params = good;
    change(params);
    return !products_->serves(params, GetParam().is_kn);
  };
  EXPECT_TRUE(refused([](auto& p) { p.rows = kMaxSkinnyRows + 1; }));
  EXPECT_TRUE(refused([](auto& p) { p.rows = 0; }));
  EXPECT_TRUE(refused([](auto& p) { p.top_k = kMaxSkinnyChoices; }));
  EXPECT_TRUE(refused([](auto& p) { p.experts = kMaxSkinnyExperts + 1; }));
  EXPECT_TRUE(refused([](auto& p) { p.n = 60; }));
  EXPECT_TRUE(refused([](auto& p) { p.k = 104; }));
  EXPECT_TRUE(refused([](auto& p) { p.x_stride = 100; }));
  EXPECT_TRUE(refused([](auto& p) { p.weight_stride = 100; }));
  EXPECT_TRUE(refused([](auto& p) { p.out_stride = 97; }));
  EXPECT_TRUE(refused([](auto& p) { p.x = reinterpret_cast<const void*>(uintptr_t{264}); }));
  EXPECT_TRUE(refused([](auto& p) { p.weight_stride = INT32_MAX / 8 * 8; }));
}

// Tiles are partial, stages repeat, k has fewer pieces than warps, and experts have several rows.
constexpr ExpertProduct kGated = ExpertProduct::gated, kCombined = ExpertProduct::combined;
INSTANTIATE_TEST_SUITE_P(
    Shapes, SkinnyExpertsTest,
    ::testing::Values(
        Shape{"gates", kGated, false, 40, 1696, 5, 2, Gates::separate, false, false},
        Shape{"joined_gates", kGated, false, 24, 96, 6, 3, Gates::joined, true},
        Shape{"alternating_gates", kGated, false, 16, 448, 4, 1, Gates::alternating, true},
        Shape{"kn_gates", kGated, true, 48, 80, 5, 2, Gates::separate, false, false},
        Shape{"kn_joined_gates", kGated, true, 40, 816, 9, 4, Gates::joined, true},
        Shape{"kn_alternating_gates", kGated, true, 56, 1120, 7, 3, Gates::alternating, true,
              false},
        Shape{"sums", kCombined, false, 72, 224, 40, 6},
        Shape{"sums_of_many_experts", kCombined, false, 16, 32, 300, 9},
        Shape{"sums_added", kCombined, false, 24, 1696, 5, 2, Gates::separate, true, true, true},
        Shape{"unscaled_sums", kCombined, false, 16, 32, 3, 1, Gates::separate, true, false},
        Shape{"kn_sums", kCombined, true, 72, 400, 12, 5, Gates::separate, true},
        Shape{"kn_sums_added", kCombined, true, 136, 1040, 4, 2, Gates::separate, false, true,
              true}),
    [](const auto& shape) { return shape.param.name; });

}  // namespace
}  // namespace fovea::kernels::cuda
