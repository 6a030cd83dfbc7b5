// SPDX-License-Identifier: Apache-2.0
// Every fp8 number as a key and as a value of the SIMD attention, which converts them in registers.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <numeric>
#include <tuple>
#include <vector>

#include "core/float_types.h"
#include "kernels/cpu/attention.h"

namespace fovea {
namespace {

using kernels::AttentionParams;
using kernels::cpu::AttentionShape;
using kernels::cpu::Isa;

constexpr int32_t kCodes = 256, kKeys = 64, kDim = 64;
constexpr size_t kPageElements = size_t{kKeys} * kDim;

struct Result {
  std::vector<float> out, lse;
};

// Request c has one page, page c of k and v, and q_len equal queries.
Result attend(Isa isa, DType dtype, int32_t q_len, std::vector<uint8_t>& k, std::vector<uint8_t>& v,
              std::vector<float>& q) {
  const int32_t tokens = kCodes * q_len;
  Result result;
  result.out.resize(q.size());
  result.lse.resize(static_cast<size_t>(tokens));
  std::vector<int32_t> table(kCodes), kv_lens(kCodes, kKeys), q_indptr(kCodes + 1);
  std::iota(table.begin(), table.end(), 0);
  for (int32_t i = 0; i <= kCodes; ++i) q_indptr[static_cast<size_t>(i)] = i * q_len;

  AttentionParams params;
  KvLayerView& cache = params.keys.cache;
  cache.dtype = dtype;
  cache.page_size = kKeys;
  cache.slots = kCodes * kKeys;
  cache.k = reinterpret_cast<char*>(k.data());
  cache.v = reinterpret_cast<char*>(v.data());
  cache.k_page_stride = cache.v_page_stride = kPageElements;
  cache.k_token_stride = cache.v_token_stride = kDim;
  cache.k_head_stride = cache.v_head_stride = kDim;
  params.keys.page_table = table.data();
  params.keys.page_table_stride = 1;
  params.q = dense_rows(q.data(), DType::f32, 1, kDim);
  params.out = dense_rows(result.out.data(), DType::f32, 1, kDim);
  params.lse = result.lse.data();
  params.requests = kCodes;
  params.q_indptr = q_indptr.data();
  params.kv_lens = kv_lens.data();
  params.q_heads = params.kv_heads = 1;
  params.head_dim = params.head_dim_v = kDim;
  params.scale = 1;
  params.mask.causal = false;
  const AttentionShape shape = {isa, 1, 1, 1, kDim, kDim};
  struct alignas(64) Line {
    std::byte bytes[64];
  };
  const size_t bytes =
      kernels::cpu::attention_workspace_bytes(shape, {kCodes, tokens, q_len, kKeys, 0});
  std::vector<Line> workspace(bytes / sizeof(Line) + 1);
  ThreadPool threads(1);
  const auto schedule = kernels::cpu::plan_attention(
      shape, params, {reinterpret_cast<std::byte*>(workspace.data()), bytes});
  kernels::cpu::attention(shape, params, schedule, threads);
  return result;
}

class Fp8Attention : public ::testing::TestWithParam<std::tuple<Isa, DType, int32_t>> {
 protected:
  void SetUp() override {
    if (!has_isa(isa())) GTEST_SKIP() << "this processor lacks " << isa_name(isa());
  }
  static Isa isa() { return std::get<0>(GetParam()); }
  static DType dtype() { return std::get<1>(GetParam()); }
  static int32_t q_len() { return std::get<2>(GetParam()); }
  static float number(int32_t code) {
    const uint8_t bytes[4] = {static_cast<uint8_t>(code)};
    return load_float(bytes, dtype(), 0);
  }
};

// One element of all keys is the number. The query is 1 or -1 there, so the score is the magnitude.
TEST_P(Fp8Attention, ReadsEveryKey) {
  std::vector<uint8_t> k(kCodes * kPageElements), v(k.size());
  std::vector<float> q(static_cast<size_t>(kCodes * q_len()) * kDim);
  for (int32_t code = 0; code < kCodes; ++code) {
    const size_t element = static_cast<size_t>(code % kDim);
    for (size_t key = 0; key < kKeys; ++key) {
      k[static_cast<size_t>(code) * kPageElements + key * kDim + element] =
          static_cast<uint8_t>(code);
    }
    for (int32_t t = 0; t < q_len(); ++t) {
      q[static_cast<size_t>(code * q_len() + t) * kDim + element] = code < 128 ? 1.0f : -1.0f;
    }
  }
  const Result result = attend(isa(), dtype(), q_len(), k, v, q);
  for (int32_t token = 0; token < kCodes * q_len(); ++token) {
    const int32_t code = token / q_len();
    const float lse = result.lse[static_cast<size_t>(token)];
    if (!std::isfinite(number(code))) {
      EXPECT_FALSE(std::isfinite(lse)) << "code " << code;
      continue;
    }
    const double score = std::fabs(static_cast<double>(number(code)));
    EXPECT_FLOAT_EQ(lse, static_cast<float>(score + std::log(kKeys))) << "code " << code;
  }
}

// All scores are 0, so the mean of 64 equal values is exact.
TEST_P(Fp8Attention, ReadsEveryValue) {
  std::vector<uint8_t> k(kCodes * kPageElements), v;
  std::vector<float> q(static_cast<size_t>(kCodes * q_len()) * kDim);
  for (int32_t code = 0; code < kCodes; ++code) {
    v.insert(v.end(), kPageElements, static_cast<uint8_t>(code));
  }
  const Result result = attend(isa(), dtype(), q_len(), k, v, q);
  for (size_t i = 0; i < result.out.size(); ++i) {
    const int32_t code = static_cast<int32_t>(i) / kDim / q_len();
    const float want = number(code);
    if (std::isnan(want)) {
      EXPECT_TRUE(std::isnan(result.out[i])) << "code " << code;
    } else {
      EXPECT_EQ(result.out[i], want) << "code " << code;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, Fp8Attention,
                         ::testing::Combine(::testing::Values(Isa::avx2, Isa::avx512),
                                            ::testing::Values(DType::f8e4m3, DType::f8e5m2),
                                            ::testing::Values(1, 20)));

}  // namespace
}  // namespace fovea
