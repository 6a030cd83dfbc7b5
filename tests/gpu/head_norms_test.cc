// SPDX-License-Identifier: Apache-2.0
// Norms and rotations on the way to the cache have the bits of layer_ops' prepare_heads before a
// plain write.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <string>
#include <vector>

#include "core/float_types.h"
#include "core/rounding.h"
#include "kernels/cuda/portable/kv_write/launch.h"
#include "support/bf16_noise.h"
#include "support/device_array.h"
#include "support/gpu_kernel_test.h"

namespace fovea::kernels::cuda {
namespace {

using test::bf16_noise;
using test::to_device;
using test::to_host;

constexpr int32_t kTokens = 5, kQueryHeads = 6, kKvHeads = 2, kPositions = 40;
constexpr uint16_t kUntouched = 0x4660;

struct Case {
  int32_t dim, rotary_dim;
  bool interleaved, norms_k;
  float plus;
};

class HeadNorms : public test::GpuKernelTest<::testing::TestWithParam<Case>> {
 protected:
  struct Written {
    std::vector<uint16_t> rows, k, v;
  };

  static size_t width() {
    return static_cast<size_t>((kQueryHeads + 2 * kKvHeads) * GetParam().dim);
  }
  static size_t cached() { return static_cast<size_t>(kTokens * kKvHeads * GetParam().dim); }

  void SetUp() override {
    GpuKernelTest::SetUp();
    if (IsSkipped()) return;
    const auto pairs = static_cast<size_t>(GetParam().rotary_dim / 2);
    std::vector<float> cos, sin;
    for (size_t i = 0; i < kPositions * pairs; ++i) {
      cos.push_back(std::cos(static_cast<float>(i)));
      sin.push_back(std::sin(static_cast<float>(i)));
    }
    cos_ = to_device(cos);
    sin_ = to_device(sin);
    positions_ = to_device(std::vector<int32_t>{3, 39, 0, 17, 8});
    slots_ = to_device(std::vector<int64_t>{2, 0, 4, -1, 1});
    q_indptr_ = to_device(std::vector<int32_t>{0, kTokens});
    uint32_t seed = 7;
    for (gpu::DeviceBuffer& norm : norms_) {
      std::vector<float> weight;
      for (const uint16_t value : bf16_noise(static_cast<size_t>(GetParam().dim), seed++)) {
        weight.push_back(bf16_to_float(value));
      }
      norm = to_device(weight);
    }
  }

  NormWeights norm(size_t set) const {
    if (set == 1 && !GetParam().norms_k) return {};
    return {norms_[set].data<float>(), 1e-3f, GetParam().plus};
  }
  RotaryParams rotary() const {
    return {cos_.data<float>(), sin_.data<float>(), kPositions, GetParam().rotary_dim,
            GetParam().interleaved};
  }

  // Writes the k and v of `rows`, whose q is normed and rotated in place if the write does it.
  Written write(const gpu::DeviceBuffer& rows, bool prepares) const {
    const int32_t dim = GetParam().dim;
    const auto k_cache = to_device(std::vector<uint16_t>(cached(), kUntouched));
    const auto v_cache = to_device(std::vector<uint16_t>(cached(), kUntouched));
    auto* const q = rows.data<uint16_t>();
    HeadWriteParams params{};
    params.tokens = kTokens;
    KvWriteParams& to = params.rows;
    to.k = q + kQueryHeads * dim;
    to.v = q + (kQueryHeads + kKvHeads) * dim;
    to.k_token_stride = to.v_token_stride = to.q_token_stride = static_cast<int64_t>(width());
    to.k_head_stride = to.v_head_stride = to.q_head_stride = dim;
    to.slots = slots_.data<int64_t>();
    to.slot_count = kTokens;
    to.q_indptr = q_indptr_.data<int32_t>();
    to.requests = 1;
    to.k_cache = k_cache.data();
    to.v_cache = v_cache.data();
    to.page_size = 1;
    to.k_page_stride = to.v_page_stride = int64_t{kKvHeads} * dim;
    to.k_cache_head_stride = to.v_cache_head_stride = dim;
    to.scale_kind = kScaleNone;
    to.kv_heads = kKvHeads;
    to.head_dim = to.head_dim_v = dim;
    if (prepares) {
      to.rotary = rotary();
      to.positions = positions_.data<int32_t>();
      to.q = q;
      to.q_heads = kQueryHeads;
      params.q_norm = norm(0);
      params.k_norm = norm(1);
    }
    KvWrite(kv_write_variant(DType::bf16, DType::bf16, context->info().sm), *store)
        .run(params, Stream{});
    return {to_host<uint16_t>(rows, kTokens * width()), to_host<uint16_t>(k_cache, cached()),
            to_host<uint16_t>(v_cache, cached())};
  }

  void prepare(const gpu::DeviceBuffer& rows) const {
    HeadSetsParams params{};
    int32_t heads = 0;
    for (size_t set = 0; set < 2; ++set) {
      HeadsParams& to = params.sets[set];
      to.x = rows.data<uint16_t>() + heads * GetParam().dim;
      to.row_stride = static_cast<int64_t>(width());
      to.head_stride = to.dim = GetParam().dim;
      to.positions = positions_.data<int32_t>();
      to.norm = norm(set);
      to.rotary = rotary();
      to.l2_epsilon = -1;
      to.rows = kTokens;
      to.heads = set == 0 ? kQueryHeads : kKvHeads;
      heads += to.heads;
    }
    const Kernel kernel = load("portable/layer_ops", {"prepare_heads"});
    kernel.launch({static_cast<uint32_t>(ceil_div(kTokens * heads, kernel.row_tile()))}, params,
                  Stream{});
  }

  gpu::DeviceBuffer cos_, sin_, positions_, slots_, q_indptr_;
  std::array<gpu::DeviceBuffer, 2> norms_;  // for q and k
};

TEST_P(HeadNorms, HaveTheBitsOfSeparateKernels) {
  const std::vector<uint16_t> given = bf16_noise(kTokens * width(), 5);
  const auto at_once = to_device(given), in_turn = to_device(given);
  prepare(in_turn);
  const Written want = write(in_turn, false), got = write(at_once, true);
  ASSERT_NE(want.rows, given);
  EXPECT_EQ(got.k, want.k);
  EXPECT_EQ(got.v, want.v);
  const auto queries = static_cast<size_t>(kQueryHeads * GetParam().dim);
  for (size_t i = 0; i < got.rows.size(); ++i) {
    const bool is_query = i % width() < queries;
    ASSERT_EQ(got.rows[i], is_query ? want.rows[i] : given[i])
        << i / width() << ", " << i % width();
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, HeadNorms,
                         ::testing::Values(Case{128, 128, false, true, 0},
                                           Case{128, 20, false, true, 1},
                                           Case{64, 64, true, false, 0},
                                           Case{256, 128, true, true, 0},
                                           Case{80, 80, false, true, 0}),
                         [](const auto& test) {
                           const Case& c = test.param;
                           return "dim_" + std::to_string(c.dim) + "_of_which_" +
                                  std::to_string(c.rotary_dim) +
                                  (c.interleaved ? "_interleaved" : "");
                         });

}  // namespace
}  // namespace fovea::kernels::cuda
