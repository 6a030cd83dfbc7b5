// SPDX-License-Identifier: Apache-2.0
// Products of up to 8 rows and of 9 to 128 by themselves, in every variant: correct by fp64, with
// biases, gates and partial tiles, and nothing written beyond the rows and columns of the output;
// norms that begin in one product and end in the next.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "core/float_types.h"
#include "kernels/cuda/common/layer_params.h"
#include "kernels/cuda/portable/skinny_gemm/launch.h"
#include "kernels/cuda/sm90/narrow_gemm/launch.h"
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

enum class Kernels { skinny, narrow };

// The kernels of one kind. Variants of narrow kernels are divisions.
class Products {
 public:
  Products(Kernels kind, int sm, gpu::KernelStore& store)
      : kind_(kind), skinny_(sm, store), narrow_(sm, store) {}

  bool compute(const SkinnyGemmParams& params) const {
    return kind_ == Kernels::skinny ? SkinnyProducts::serves(params) : narrow_.computes(params);
  }
  size_t variants() const {
    return kind_ == Kernels::skinny ? SkinnyProducts::kStages.size()
                                    : NarrowProducts::kDivisions.size();
  }
  std::vector<int32_t> row_counts() const {
    if (kind_ == Kernels::skinny)
      return {1, SkinnyProducts::kMaxRows - 1, SkinnyProducts::kMaxRows};
    return {NarrowProducts::kMinRows, 16, 31, 41, 60, 71, 96, 107, NarrowProducts::kMaxRows};
  }
  void run(const SkinnyGemmParams& params, size_t variant) const {
    if (kind_ == Kernels::skinny) return skinny_.run(params, variant, nullptr);
    narrow_.run(params, NarrowProducts::kDivisions[variant], nullptr);
  }

 private:
  Kernels kind_;
  SkinnyProducts skinny_;
  NarrowProducts narrow_;
};

struct Shape {
  int32_t n, k;
  bool is_f32 = false, has_bias = false, is_gated = false;
  Kernels kernels = Kernels::skinny;
};

class SkinnyGemmTest : public test::GpuKernelTest<::testing::TestWithParam<Shape>> {
 protected:
  void SetUp() override {
    GpuKernelTest::SetUp();
    if (IsSkipped()) return;
    if (GetParam().kernels == Kernels::narrow && context->info().sm != 90) GTEST_SKIP();
    products_.emplace(GetParam().kernels, context->info().sm, *store);
    weight_rows_ = GetParam().is_gated ? 2 * GetParam().n : GetParam().n;
    weight_ = bf16_noise(static_cast<size_t>(weight_rows_) * stride(), 3);
    bias_ = bf16_noise(static_cast<size_t>(weight_rows_), 5);
    weight_device_ = to_device(weight_);
    std::vector<float> bias;
    for (const uint16_t value : bias_) bias.push_back(bf16_to_float(value));
    bias_device_ = GetParam().is_f32 ? to_device(bias) : to_device(bias_);
  }

  size_t stride() const { return static_cast<size_t>(GetParam().k + kPadding); }
  size_t out_stride() const { return static_cast<size_t>(GetParam().n + kPadding); }

  // Returns rows + 1 rows of the output, with their padding.
  std::vector<float> run(const gpu::DeviceBuffer& x, int32_t rows, size_t variant) {
    const Shape& shape = GetParam();
    const size_t count = static_cast<size_t>(rows + 1) * out_stride();
    const auto out = shape.is_f32
                         ? to_device(std::vector<float>(count, kUntouched))
                         : to_device(std::vector<uint16_t>(count, float_to_bf16(kUntouched)));
    SkinnyGemmParams params{};
    params.x = x.data();
    params.weight = weight_device_.data();
    params.bias = shape.has_bias ? bias_device_.data() : nullptr;
    params.out = out.data();
    params.x_stride = params.weight_stride = static_cast<int64_t>(stride());
    params.out_stride = static_cast<int64_t>(out_stride());
    params.rows = rows;
    params.n = shape.n;
    params.k = shape.k;
    params.out_is_f32 = shape.is_f32;
    params.up_offset = shape.is_gated ? shape.n : 0;
    params.activation = kSilu;
    EXPECT_TRUE(products_->compute(params));
    products_->run(params, variant);
    gpu::synchronize(nullptr);
    if (shape.is_f32) return to_host<float>(out, count);
    std::vector<float> values;
    for (const uint16_t value : to_host<uint16_t>(out, count)) {
      values.push_back(bf16_to_float(value));
    }
    return values;
  }

  double exact_sum(const std::vector<uint16_t>& x, int32_t row, int32_t weight_row) const {
    const uint16_t* const left = x.data() + static_cast<size_t>(row) * stride();
    const uint16_t* const right = weight_.data() + static_cast<size_t>(weight_row) * stride();
    double sum = 0;
    for (int32_t i = 0; i < GetParam().k; ++i) {
      sum += double{bf16_to_float(left[i])} * bf16_to_float(right[i]);
    }
    if (GetParam().has_bias) sum += bf16_to_float(bias_[static_cast<size_t>(weight_row)]);
    return sum;
  }

  double exact(const std::vector<uint16_t>& x, int32_t row, int32_t column) const {
    const double sum = exact_sum(x, row, column);
    if (!GetParam().is_gated) return sum;
    const double gate = bf16_to_float(float_to_bf16(static_cast<float>(sum)));
    const double up =
        bf16_to_float(float_to_bf16(static_cast<float>(exact_sum(x, row, GetParam().n + column))));
    return gate / (1 + std::exp(-gate)) * up;
  }

  std::optional<Products> products_;
  int32_t weight_rows_ = 0;
  std::vector<uint16_t> weight_, bias_;
  gpu::DeviceBuffer weight_device_, bias_device_;
};

TEST_P(SkinnyGemmTest, EveryTileIsRight) {
  const Shape& shape = GetParam();
  for (size_t variant = 0; variant < products_->variants(); ++variant) {
    for (const int32_t rows : products_->row_counts()) {
      SCOPED_TRACE("variant " + std::to_string(variant) + ", rows " + std::to_string(rows));
      std::vector<uint16_t> x = bf16_noise(static_cast<size_t>(rows) * stride(), 11);
      const std::vector<float> out = run(to_device(x), rows, variant);
      for (int32_t row = 0; row <= rows; ++row) {
        for (size_t i = 0; i < out_stride(); ++i) {
          const float got = out[static_cast<size_t>(row) * out_stride() + i];
          const auto column = static_cast<int32_t>(i);
          if (row == rows || column >= shape.n) {
            ASSERT_EQ(got, kUntouched) << row << ", " << column;
            continue;
          }
          const double want = exact(x, row, column);
          const double limit = shape.is_gated ? std::abs(want) / 32 + 0.05
                               : shape.is_f32 ? 1e-3
                                              : std::abs(want) / 200 + 1e-3;
          ASSERT_TRUE(test::is_near(got, want, limit)) << row << ", " << column;
        }
      }
    }
  }
}

// Other rows do not change a row. Neither do variants, unless they share k among blocks.
TEST_P(SkinnyGemmTest, ARowIsTheSameAmongOthers) {
  const bool is_narrow = GetParam().kernels == Kernels::narrow;
  const int32_t few = products_->row_counts().front(), many = products_->row_counts().back();
  const std::vector<uint16_t> x = bf16_noise(static_cast<size_t>(many) * stride(), 13);
  // Returns the last `few` of `rows` rows, with their padding.
  const auto last = [&](const std::vector<float>& out, int32_t rows) {
    const auto end = out.begin() + static_cast<int64_t>(out_stride()) * rows;
    return std::vector<float>(end - static_cast<int64_t>(out_stride()) * few, end);
  };
  const std::vector<uint16_t> own(x.end() - static_cast<int64_t>(stride()) * few, x.end());
  std::vector<float> alone;
  for (size_t variant = 0; variant < products_->variants(); ++variant) {
    if (alone.empty() || is_narrow) alone = last(run(to_device(own), few, variant), few);
    const std::vector<float> among = last(run(to_device(x), many, variant), many);
    for (size_t i = 0; i < alone.size(); ++i) {
      ASSERT_EQ(alone[i], among[i]) << "variant " << variant << ", row " << i / out_stride()
                                    << " of the last, column " << i % out_stride();
    }
  }
}

std::string name_of(const ::testing::TestParamInfo<Shape>& info) {
  const Shape& shape = info.param;
  return std::to_string(shape.n) + "_" + std::to_string(shape.k) +
         (shape.is_f32 ? "_f32" : "_bf16") + (shape.has_bias ? "_bias" : "") +
         (shape.is_gated ? "_gated" : "") + (shape.kernels == Kernels::narrow ? "_narrow" : "");
}

// Fewer steps than warps, partial tiles, stages that repeat.
INSTANTIATE_TEST_SUITE_P(Shapes, SkinnyGemmTest,
                         ::testing::Values(Shape{40, 64}, Shape{72, 448, true}, Shape{24, 2432},
                                           Shape{64, 2624, true, true}, Shape{7, 1024, false, true},
                                           Shape{44, 960, false, false, true},
                                           Shape{16, 192, false, true, true}),
                         name_of);
INSTANTIATE_TEST_SUITE_P(NarrowShapes, SkinnyGemmTest,
                         ::testing::Values(Shape{16, 128, false, false, false, Kernels::narrow},
                                           Shape{144, 640, true, true, false, Kernels::narrow},
                                           Shape{272, 1920, false, true, false, Kernels::narrow},
                                           Shape{40, 1152, false, false, true, Kernels::narrow},
                                           Shape{136, 384, false, true, true, Kernels::narrow}),
                         name_of);

// A product adds to a residual stream and begins a norm; another product ends it.
class NormsOfProducts : public test::GpuKernelTest<::testing::TestWithParam<Kernels>> {
 protected:
  static constexpr int32_t kK = 640, kColumns = 80;
  static constexpr float kFactor = 0.25f, kEpsilon = 1e-3f, kPlus = 1;

  struct Begun {
    std::vector<float> stream, squares;
    std::vector<uint16_t> rows;
  };

  void SetUp() override {
    GpuKernelTest::SetUp();
    if (IsSkipped()) return;
    if (GetParam() == Kernels::narrow && context->info().sm != 90) GTEST_SKIP();
    products_.emplace(GetParam(), context->info().sm, *store);
  }
  static std::vector<float> floats_of(const std::vector<uint16_t>& bits) {
    std::vector<float> values;
    for (const uint16_t value : bits) values.push_back(bf16_to_float(value));
    return values;
  }
  // Returns sum over i of a[i] * b[i].
  static double dot(const uint16_t* a, const uint16_t* b, int32_t count) {
    double sum = 0;
    for (int32_t i = 0; i < count; ++i) sum += double{bf16_to_float(a[i])} * bf16_to_float(b[i]);
    return sum;
  }

  // Adds the product of x and `weight` [n, kK] to `before`, with rows + 1 rows in every output.
  Begun begin(const std::vector<uint16_t>& x, const std::vector<uint16_t>& weight,
              const std::vector<float>& before, int32_t rows, size_t variant) const {
    const auto n = static_cast<int32_t>(norm_.size());
    const size_t squares = static_cast<size_t>(squares_of(n));
    const auto x_device = to_device(x), weight_device = to_device(weight);
    const auto stream = to_device(before), bias = to_device(bias_), norm = to_device(norm_);
    const size_t count = before.size();
    const auto out = to_device(std::vector<uint16_t>(count, float_to_bf16(kUntouched)));
    const auto sums =
        to_device(std::vector<float>(static_cast<size_t>(rows + 1) * squares, kUntouched));
    SkinnyGemmParams params{};
    params.x = x_device.data();
    params.weight = weight_device.data();
    params.bias = bias.data();
    params.out = out.data();
    params.x_stride = params.weight_stride = params.k = kK;
    params.out_stride = params.n = n;
    params.rows = rows;
    params.stream = stream.data<float>();
    params.stream_factor = kFactor;
    params.norm = {norm.data<float>(), kEpsilon, kPlus};
    params.squares = sums.data<float>();
    products_->run(params, variant);
    gpu::synchronize(nullptr);
    return {to_host<float>(stream, count),
            to_host<float>(sums, static_cast<size_t>(rows + 1) * squares),
            to_host<uint16_t>(out, count)};
  }

  // Returns the product of the begun rows and `weight` [kColumns, n].
  std::vector<float> end(const Begun& begun, const std::vector<uint16_t>& weight, int32_t rows,
                         size_t variant) const {
    const auto n = static_cast<int32_t>(norm_.size());
    const auto x = to_device(begun.rows), weight_device = to_device(weight);
    const auto squares = to_device(begun.squares);
    const size_t count = static_cast<size_t>(rows) * kColumns;
    const auto out = to_device(std::vector<float>(count, kUntouched));
    SkinnyGemmParams params{};
    params.x = x.data();
    params.weight = weight_device.data();
    params.out = out.data();
    params.x_stride = params.weight_stride = params.k = n;
    params.out_stride = params.n = kColumns;
    params.rows = rows;
    params.out_is_f32 = 1;
    params.in_squares = squares.data<float>();
    params.in_epsilon = kEpsilon;
    products_->run(params, variant);
    gpu::synchronize(nullptr);
    return to_host<float>(out, count);
  }

  std::optional<Products> products_;
  std::vector<float> norm_, bias_;  // [n]
};

TEST_P(NormsOfProducts, BeginInOneAndEndInTheNext) {
  const bool is_narrow = GetParam() == Kernels::narrow;
  const int32_t depth = is_narrow ? kNarrowDepth : kSkinnyDepth;
  const std::vector<int32_t> widths =
      is_narrow ? std::vector<int32_t>{384, 208, 1152} : std::vector<int32_t>{192, 200, 4160};
  for (const int32_t n : widths) {
    const auto width = static_cast<size_t>(n);
    norm_ = floats_of(bf16_noise(width, 17));
    bias_ = floats_of(bf16_noise(width, 19));
    const std::vector<uint16_t> weight = bf16_noise(width * kK, 23);
    const std::vector<uint16_t> next = bf16_noise(width * kColumns, 29);
    for (size_t variant = 0; variant < products_->variants(); ++variant) {
      const int32_t rows = is_narrow ? (n == 208 ? 50 : n == 384 ? 117 : 13) : n > 1000 ? 3 : 7;
      SCOPED_TRACE("n " + std::to_string(n) + ", variant " + std::to_string(variant));
      const std::vector<uint16_t> x = bf16_noise(static_cast<size_t>(rows) * kK, 31);
      const size_t count = static_cast<size_t>(rows + 1) * width;
      const std::vector<float> before = floats_of(bf16_noise(count, 37));
      const Begun begun = begin(x, weight, before, rows, variant);
      for (size_t i = 0; i < count; ++i) {
        const size_t row = i / width, column = i % width;
        if (row == static_cast<size_t>(rows)) {
          ASSERT_EQ(begun.stream[i], before[i]) << column;
          ASSERT_EQ(begun.rows[i], float_to_bf16(kUntouched)) << column;
          continue;
        }
        const double want =
            before[i] + kFactor * (dot(&x[row * kK], &weight[column * kK], kK) + bias_[column]);
        ASSERT_TRUE(test::is_near(begun.stream[i], want, 1e-3)) << row << ", " << column;
        ASSERT_EQ(begun.rows[i], float_to_bf16(begun.stream[i] * (kPlus + norm_[column])));
      }
      const auto sums = static_cast<size_t>(squares_of(n));
      for (size_t i = 0; i < begun.squares.size(); ++i) {
        double want = i / sums == static_cast<size_t>(rows) ? kUntouched : 0;
        const size_t first = i % sums * kSquaredColumns;
        for (size_t c = first; want != kUntouched && c < std::min(first + 16, width); ++c) {
          want += std::pow(double{begun.stream[i / sums * width + c]}, 2);
        }
        ASSERT_TRUE(test::is_near(begun.squares[i], want, 1e-5 * want)) << i;
      }
      if (n % depth != 0) continue;
      const std::vector<float> out = end(begun, next, rows, variant);
      for (size_t i = 0; i < out.size(); ++i) {
        const size_t row = i / kColumns;
        double squares = 0;
        for (size_t c = 0; c < width; ++c) {
          squares += std::pow(double{begun.stream[row * width + c]}, 2);
        }
        const double want = dot(&begun.rows[row * width], &next[i % kColumns * width], n) /
                            std::sqrt(squares / n + kEpsilon);
        ASSERT_TRUE(test::is_near(out[i], want, 1e-3)) << i;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, NormsOfProducts,
                         ::testing::Values(Kernels::skinny, Kernels::narrow),
                         [](const auto& kernels) {
                           return kernels.param == Kernels::skinny ? "skinny" : "narrow";
                         });

TEST(SkinnyProducts, RefusesWhatItCannotCompute) {
  SkinnyGemmParams good{};
  good.x = good.weight = reinterpret_cast<const void*>(uintptr_t{256});
  good.x_stride = good.weight_stride = 128;
  good.rows = 8;
  good.n = 5;
  good.k = 128;
  EXPECT_TRUE(SkinnyProducts::serves(good));
  const auto refused = [&](auto change) {
    SkinnyGemmParams params = good;
    change(params);
    return !SkinnyProducts::serves(params);
  };
  EXPECT_TRUE(refused([](auto& p) { p.rows = 9; }));
  EXPECT_TRUE(refused([](auto& p) { p.rows = 0; }));
  EXPECT_TRUE(refused([](auto& p) { p.n = 0; }));
  EXPECT_TRUE(refused([](auto& p) { p.k = 96; }));
  EXPECT_TRUE(refused([](auto& p) { p.k = 0; }));
  EXPECT_TRUE(refused([](auto& p) { p.x_stride = 132; }));
  EXPECT_TRUE(refused([](auto& p) { p.weight_stride = 129; }));
  EXPECT_TRUE(refused([](auto& p) { p.x = reinterpret_cast<const void*>(uintptr_t{264}); }));
  EXPECT_TRUE(refused([](auto& p) { p.weight = reinterpret_cast<const void*>(uintptr_t{258}); }));
}

}  // namespace
}  // namespace fovea::kernels::cuda
