// SPDX-License-Identifier: Apache-2.0
// The kernels that `fovea bench` compares others with. Skipped without a GPU.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "bench/gpu_ceilings.h"
#include "core/float_types.h"
#include "fovea/gpu.h"
#include "kernels/cuda/common/measure_params.h"
#include "support/device_array.h"

namespace fovea::bench {
namespace {

using namespace kernels::cuda;

class MeasureKernelsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!why_no_gpu().empty()) GTEST_SKIP() << why_no_gpu();
    context.emplace(0);
    kernels.emplace(*context);
  }
  template <typename T>
  std::vector<T> noise(DType dtype, int64_t count, uint32_t seed, float factor, float offset) {
    const gpu::DeviceBuffer buffer(static_cast<size_t>(count) * sizeof(T));
    kernels->fill_noise(buffer.data(), dtype, count, seed, factor, offset, nullptr);
    return test::to_host<T>(buffer, static_cast<size_t>(count));
  }
  std::optional<gpu::Context> context;
  std::optional<MeasureKernels> kernels;
};

TEST_F(MeasureKernelsTest, NoiseIsNormal) {
  const auto values = noise<float>(DType::f32, 1 << 20, 1, 2, 3);
  double sum = 0, squares = 0, beyond_two = 0;
  for (const float value : values) {
    const double z = (value - 3) / 2;
    sum += z;
    squares += z * z;
    beyond_two += std::abs(z) > 2;
  }
  const auto count = static_cast<double>(values.size());
  // Five standard errors of a million draws.
  EXPECT_NEAR(sum / count, 0, 0.005);
  EXPECT_NEAR(squares / count, 1, 0.007);
  EXPECT_NEAR(beyond_two / count, 0.0443, 0.001);  // twelve bytes; a normal variable has 0.0455
}

TEST_F(MeasureKernelsTest, NoiseOfEveryTypeIsTheSame) {
  const auto exact = noise<float>(DType::f32, 4096, 5, 100, 0);
  const auto half = noise<uint16_t>(DType::bf16, 4096, 5, 100, 0);
  const auto eight = noise<uint8_t>(DType::f8e4m3, 4096, 5, 100, 0);
  EXPECT_NE(exact, noise<float>(DType::f32, 4096, 6, 100, 0));
  for (size_t i = 0; i < exact.size(); ++i) {
    EXPECT_NEAR(bf16_to_float(half[i]), exact[i], std::abs(exact[i]) / 128);
    const float clamped = std::clamp(exact[i], -448.0f, 448.0f);
    EXPECT_NEAR(f8e4m3_to_float(eight[i]), clamped, std::max(std::abs(clamped) / 8, 0.002f));
  }
}

// A row that sees two keys, in pages of two, and a result with a known error.
TEST_F(MeasureKernelsTest, RowErrorIsTheDistanceFromAttention) {
  constexpr int kDim = 64;
  std::vector<uint16_t> k(4 * kDim, 0xffff), v(4 * kDim, 0xffff), q(kDim), out(kDim);
  const std::vector<int32_t> slots = {3, 0};
  for (int d = 0; d < kDim; ++d) {
    q[d] = float_to_bf16(1);
    k[3 * kDim + d] = float_to_bf16(0.25f);  // score 2
    k[d] = float_to_bf16(0.125f);            // score 1
    v[3 * kDim + d] = float_to_bf16(1);
    v[d] = float_to_bf16(-1);
    out[d] = float_to_bf16(0.5f);
  }
  const SampledRow row{.request = 0, .token = 0, .q_head = 0, .key_begin = 0, .key_end = 2};
  const auto dk = test::to_device(k), dv = test::to_device(v), dq = test::to_device(q),
             dout = test::to_device(out);
  const auto dslots = test::to_device(slots), drow = test::to_device(std::vector<SampledRow>{row});
  const gpu::DeviceBuffer error(sizeof(RowError)), scores(2 * sizeof(double));
  AttentionRowsParams params{};
  params.rows = drow.data<SampledRow>();
  params.errors = error.data<RowError>();
  params.scores = scores.data<double>();
  params.scores_stride = 2;
  params.q = dq.data();
  params.out = dout.data();
  params.k = dk.data();
  params.v = dv.data();
  params.k_page_stride = params.v_page_stride = 2 * kDim;
  params.k_token_stride = params.v_token_stride = kDim;
  params.k_head_stride = params.v_head_stride = kDim;
  params.slots = dslots.data<int32_t>();
  params.slots_stride = 2;
  params.page_size = 2;
  params.q_heads = params.kv_heads = 1;
  params.head_dim = params.head_dim_v = kDim;
  params.scale = 1 / 8.0;
  kernels->get("measure/attention_rows", {"bf16", "bf16", "bf16"}).launch({1, 1}, params, nullptr);
  const RowError host = test::to_host<RowError>(error, 1).front();
  const double expected = std::tanh(0.5);  // (e^2 - e) / (e^2 + e)
  EXPECT_NEAR(host.squared_norm, kDim * expected * expected, 1e-9);
  EXPECT_NEAR(host.squared_error, kDim * (expected - 0.5) * (expected - 0.5), 1e-9);
}

TEST_F(MeasureKernelsTest, NotFiniteCountsInfinitiesAndNan) {
  std::vector<uint16_t> values(1000, float_to_bf16(1));
  values[0] = 0x7f80;
  values[500] = 0xff80;
  values[999] = 0xffff;
  const gpu::DeviceBuffer data = test::to_device(values), found(8);
  gpu::fill_bytes(found.data(), 0, 8, nullptr);
  kernels->get("measure/not_finite", {"bf16"})
      .launch(kernels->grid(), NotFiniteParams{data.data(), 1000, found.data<uint64_t>()}, nullptr);
  EXPECT_EQ(test::to_host<uint64_t>(found, 1).front(), 3u);
}

}  // namespace
}  // namespace fovea::bench
