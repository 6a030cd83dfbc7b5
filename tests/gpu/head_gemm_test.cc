// SPDX-License-Identifier: Apache-2.0
// Products per head by themselves: correct by fp64, and nothing written for skipped or unused rows.
// portable/head_gemm gives the same bits in every tile.
#include "kernels/cuda/head_gemm.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "core/float_types.h"
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

struct Shape {
  WeightOrder order;
  int32_t heads, n, k, tokens;
};

// Gemm is HeadGemm or, with kSm = 90, HopperHeadGemm.
template <typename Gemm, int kSm = 0>
class ProductsTest : public test::GpuKernelTest<::testing::TestWithParam<Shape>, kSm> {
 protected:
  using Base = test::GpuKernelTest<::testing::TestWithParam<Shape>, kSm>;
  using Base::context;
  using Base::GetParam;
  using Base::store;

  void SetUp() override {
    Base::SetUp();
    if (this->IsSkipped()) return;
    const Shape& shape = GetParam();
    const HeadGemmSetup setup = {
        .order = shape.order, .sm = context->info().sm, .multiprocessors = context->info().cores};
    gemm_.emplace(setup, *store);
    x_ = bf16_noise(size(shape.tokens, shape.k), 7);
    weights_ = bf16_noise(size(shape.n, shape.k), 8);
    x_device_ = to_device(x_);
    weights_device_ = to_device(weights_);
  }

  // Returns the number of elements in `rows` rows of each head.
  static size_t size(int32_t rows, int32_t width) {
    return static_cast<size_t>(rows) * static_cast<size_t>(GetParam().heads) *
           static_cast<size_t>(width);
  }

  // Computes tokens [first, first + count), of which `live` are in use.
  std::vector<uint16_t> run(int32_t first, int32_t count, int32_t live,
                            const std::vector<uint8_t>& skip = {}) {
    const Shape& shape = GetParam();
    const auto out = to_device(std::vector<uint16_t>(size(count, shape.n), kUntouched));
    const auto alive = to_device(std::vector<int32_t>{live});
    const auto skipped = to_device(skip.empty() ? std::vector<uint8_t>{0} : skip);
    HeadGemmParams params{};
    params.x = x_device_.data<uint16_t>() + size(first, shape.k);
    params.x_token_stride = int64_t{shape.heads} * shape.k;
    params.x_head_stride = shape.k;
    params.weight = weights_device_.data();
    params.weight_head_stride = int64_t{shape.n} * shape.k;
    params.weight_row_stride = shape.order == WeightOrder::kn ? shape.n : shape.k;
    params.out = out.data();
    params.out_token_stride = int64_t{shape.heads} * shape.n;
    params.out_head_stride = shape.n;
    params.live_tokens = alive.data<int32_t>();
    params.skip = skip.empty() ? nullptr : skipped.data<uint8_t>();
    params.tokens = count;
    params.n = shape.n;
    params.k = shape.k;
    params.heads = shape.heads;
    gemm_->run(params, nullptr);
    gpu::synchronize(nullptr);
    return to_host<uint16_t>(out, size(count, shape.n));
  }

  double exact(int32_t token, int32_t head, int32_t column) const {
    const Shape& shape = GetParam();
    const uint16_t* const x = x_.data() + size(token, shape.k) + int64_t{head} * shape.k;
    const uint16_t* const weight = weights_.data() + int64_t{head} * shape.n * shape.k;
    double sum = 0;
    for (int32_t i = 0; i < shape.k; ++i) {
      const int64_t at = shape.order == WeightOrder::kn ? int64_t{i} * shape.n + column
                                                        : int64_t{column} * shape.k + i;
      sum += double{bf16_to_float(x[i])} * bf16_to_float(weight[at]);
    }
    return sum;
  }

  std::vector<uint16_t> row(const std::vector<uint16_t>& out, int32_t token) const {
    const size_t width = size(1, GetParam().n);
    const auto begin =
        out.begin() + static_cast<std::ptrdiff_t>(static_cast<size_t>(token) * width);
    return {begin, begin + static_cast<std::ptrdiff_t>(width)};
  }
  std::vector<uint16_t> untouched() const {
    return std::vector<uint16_t>(size(1, GetParam().n), kUntouched);
  }

  // Checks some elements of a token's products for all heads.
  void expect_right(const std::vector<uint16_t>& row, int32_t token) const {
    const Shape& shape = GetParam();
    for (const int32_t head : {0, shape.heads - 1}) {
      for (const int32_t column : {0, shape.n / 2, shape.n - 1}) {
        const double expected = exact(token, head, column);
        const auto at =
            static_cast<size_t>(head) * static_cast<size_t>(shape.n) + static_cast<size_t>(column);
        EXPECT_TRUE(
            test::is_near(bf16_to_float(row[at]), expected, std::abs(expected) / 256 + 1e-3))
            << "token " << token << " head " << head << " column " << column;
      }
    }
  }

  std::optional<Gemm> gemm_;
  std::vector<uint16_t> x_, weights_;
  gpu::DeviceBuffer x_device_, weights_device_;
};

std::string name_of(const ::testing::TestParamInfo<Shape>& test) {
  const Shape& shape = test.param;
  const int64_t products = int64_t{shape.tokens} * shape.heads * shape.n * shape.k;
  return std::string(products < 150'000'000 ? "small_" : "large_") +
         (shape.order == WeightOrder::kn ? "kn_" : "nk_") + std::to_string(shape.heads) + "_" +
         std::to_string(shape.n) + "_" + std::to_string(shape.k) + "_" +
         std::to_string(shape.tokens);
}

using HeadGemmTest = ProductsTest<HeadGemm>;

class HopperHeadGemmTest : public ProductsTest<HopperHeadGemm, 90> {
 protected:
  void check(int32_t live, const std::vector<uint8_t>& skip) {
    const bool skips = std::ranges::any_of(skip, [](uint8_t flag) { return flag != 0; });
    const std::vector<uint16_t> out =
        run(0, GetParam().tokens, live, skips ? skip : std::vector<uint8_t>{});
    for (int32_t t = 0; t < GetParam().tokens; ++t) {
      if (t >= live || skip[static_cast<size_t>(t)]) {
        ASSERT_EQ(row(out, t), untouched()) << "token " << t << " of " << live;
      } else if (t % 7 == 0 || t == live - 1) {
        expect_right(row(out, t), t);
      }
    }
  }
};

TEST_P(HeadGemmTest, AnyTileGivesTheSameBits) {
  const Shape& shape = GetParam();
  const int32_t live = shape.tokens - 15;
  // Requests of 37 tokens: every third is skipped, and a range of whole tiles.
  std::vector<uint8_t> skip(static_cast<size_t>(shape.tokens));
  for (int32_t t = 0; t < shape.tokens; ++t) {
    skip[static_cast<size_t>(t)] = t / 37 % 3 == 1 || (t >= 256 && t < 640);
  }
  const std::vector<uint16_t> all = run(0, shape.tokens, live, skip);
  for (int32_t t = 0; t < shape.tokens; ++t) {
    if (t < live && !skip[static_cast<size_t>(t)]) continue;
    ASSERT_EQ(row(all, t), untouched()) << "token " << t;
  }
  for (const int32_t t : {0, 15, 127, 128, 700, live - 1}) {
    if (t >= live || skip[static_cast<size_t>(t)]) continue;
    EXPECT_EQ(row(all, t), row(run(t, 1, 1), 0)) << "token " << t << " alone";
    for (const int32_t among : {20, 100}) {
      const int32_t count = std::min(shape.tokens - t, among);
      EXPECT_EQ(row(all, t), row(run(t, count, count), 0)) << "token " << t << " among " << count;
    }
    expect_right(row(all, t), t);
  }
  EXPECT_EQ(row(run(3, 10, 0), 0), untouched());
}

// First without skipped rows, then with skipped rows in several tiles and one whole tile skipped.
TEST_P(HopperHeadGemmTest, LiveRows) {
  const Shape& shape = GetParam();
  for (const int32_t live : {shape.tokens, shape.tokens - 15, 1, 0}) {
    check(live, std::vector<uint8_t>(static_cast<size_t>(shape.tokens), 0));
    std::vector<uint8_t> skip(static_cast<size_t>(shape.tokens));
    for (int32_t t = 0; t < shape.tokens; ++t) {
      skip[static_cast<size_t>(t)] = t % 5 == 1 || t < 48 || (t >= 128 && t < 256);
    }
    check(live, skip);
  }
}

// The first two shapes take several tiles per CTA when rows are skipped.
INSTANTIATE_TEST_SUITE_P(Shapes, HeadGemmTest,
                         ::testing::Values(Shape{WeightOrder::kn, 64, 512, 128, 900},
                                           Shape{WeightOrder::nk, 64, 128, 512, 2200},
                                           Shape{WeightOrder::kn, 5, 200, 72, 300},
                                           Shape{WeightOrder::nk, 3, 72, 600, 300},
                                           Shape{WeightOrder::kn, 16, 256, 192, 1000},
                                           Shape{WeightOrder::kn, 3, 72, 192, 70},
                                           Shape{WeightOrder::nk, 2, 40, 600, 60},
                                           Shape{WeightOrder::nk, 2, 136, 72, 100}),
                         name_of);

// More tiles than multiprocessors, tiles that extend past the end, reused stages.
INSTANTIATE_TEST_SUITE_P(Shapes, HopperHeadGemmTest,
                         ::testing::Values(Shape{WeightOrder::kn, 128, 512, 128, 130},
                                           Shape{WeightOrder::nk, 128, 128, 512, 257},
                                           Shape{WeightOrder::kn, 16, 256, 192, 600},
                                           Shape{WeightOrder::nk, 150, 72, 200, 64},
                                           Shape{WeightOrder::kn, 3, 200, 72, 40},
                                           Shape{WeightOrder::nk, 2, 136, 600, 60},
                                           Shape{WeightOrder::kn, 2, 264, 136, 90},
                                           Shape{WeightOrder::nk, 2, 136, 72, 290},
                                           Shape{WeightOrder::nk, 3, 136, 72, 100}),
                         name_of);

}  // namespace
}  // namespace fovea::kernels::cuda
