// SPDX-License-Identifier: Apache-2.0
// NaN and scores of any size in the attention of every instruction set, compared with the fp64
// loops over the same cache.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <string>
#include <vector>

#include "kernels/reference/reference.h"
#include "support/cases.h"
#include "support/cpu_kernel.h"
#include "support/expect_close.h"

namespace fovea {
namespace {

using kernels::cpu::Isa;
using test::AttentionCase;
using test::CaseData;
using test::Output;

Output run_reference(const AttentionCase& test, const CaseData& data) {
  ThreadPool threads(2);
  test::KernelProblem problem(test, data, test::Fill::poison);
  if (const auto write = problem.write_params()) kernels::reference::kv_write(*write);
  kernels::reference::attention(problem.attention_params(), threads);
  return problem.output();
}

class CpuNumbers : public ::testing::TestWithParam<std::tuple<Isa, AttentionCase>> {
 protected:
  void SetUp() override {
    if (!has_isa(isa())) GTEST_SKIP() << "this processor lacks " << isa_name(isa());
  }
  static Isa isa() { return std::get<0>(GetParam()); }
  static const AttentionCase& test() { return std::get<1>(GetParam()); }
  static Output run(const CaseData& data) {
    return run_cpu_kernel(test(), data, test::Fill::poison, isa(), 2);
  }
};

// One to three new tokens after many keys, a row tile of them, and whole prompts, with so many keys
// that the parts of a request are merged.
AttentionCase shaped(AttentionCase test) {
  test.requests = {{1, 1}, {1, 1300}, {3, 90}, {40, 90}, {70, 70}};
  return test;
}

std::vector<AttentionCase> cases() {
  std::vector<AttentionCase> list;
  const auto add = [&](AttentionCase test, DType q, DType cache, KvScale scale) {
    test.name += std::string("_") + dtype_name(q).data() + "_" + dtype_name(cache).data();
    if (scale != KvScale::none) test.name += std::string("_") + test::scale_name(scale);
    test.spec.q_dtype = q;
    test.cache.dtype = cache;
    test.cache.scale = scale;
    list.push_back(shaped(test));
  };
  for (const int32_t dim : {8, 64, 80}) {
    const AttentionCase mha = test::mha_case("dim_" + std::to_string(dim), 6, 2, dim);
    for (const DType cache : {DType::f32, DType::f16, DType::bf16, DType::f8e4m3, DType::f8e5m2}) {
      add(mha, DType::f32, cache, KvScale::none);
    }
    for (const DType q : {DType::f16, DType::bf16}) {
      add(mha, q, q, KvScale::none);
      add(mha, q, DType::f8e4m3, KvScale::per_token_head);
    }
  }
  AttentionCase masked = test::mha_case("window_sinks_cap", 6, 2, 64);
  masked.spec.window = 50;
  masked.spec.scores.has_sinks = true;
  masked.spec.scores.logit_cap = 20;
  add(masked, DType::f32, DType::f32, KvScale::none);
  AttentionCase sloped = test::mha_case("alibi", 6, 2, 64);
  sloped.spec.scores.has_alibi = true;
  add(sloped, DType::f32, DType::f32, KvScale::none);
  for (const DType cache : {DType::f32, DType::f16, DType::bf16, DType::f8e4m3}) {
    add(test::mla_case("mla", 4), DType::f32, cache, KvScale::none);
  }
  AttentionCase rows = test::mla_case("mla_fp8_rows", 4);
  rows.cache.layout = KvLayout::mla_fp8_rows;
  add(rows, DType::bf16, DType::f8e4m3, KvScale::none);
  return list;
}

constexpr uint32_t kNans[] = {0x7fc00000, 0xffc00000, 0x7fffffff, 0xffffffff, 0x7f800001};

// Expects NaN where `want` has NaN, and correct numbers elsewhere. With NaN among the `values` it
// skips numbers: a row that does not see the NaN may still get it, multiplied by a weight of 0.
// Adds the number of expected NaNs to `nans`.
void expect_like(const Output& want, const Output& got, bool values, size_t& nans) {
  ASSERT_EQ(want.out.size(), got.out.size());
  for (size_t i = 0; i < want.out.size(); ++i) {
    if (values && !std::isnan(want.out[i])) continue;
    nans += std::isnan(want.out[i]);
    ASSERT_TRUE(test::is_near(got.out[i], want.out[i], 0.02 * (1 + std::fabs(want.out[i]))))
        << "out " << i;
  }
  for (size_t i = 0; i < want.lse.size(); ++i) {
    ASSERT_TRUE(test::is_near(got.lse[i], want.lse[i], 0.01 * (1 + std::fabs(want.lse[i]))))
        << "lse " << i;
  }
}

// Returns the first, a middle and the last index of a request's tensor.
std::vector<size_t> places(const std::vector<float>& numbers) {
  return {0, numbers.size() / 2 + 1, numbers.size() - 1};
}

TEST_P(CpuNumbers, NanStaysNan) {
  const CaseData data = make_data(test());
  const auto put = [&](size_t request, std::vector<float> test::RequestData::*tensor, size_t at,
                       uint32_t bits) {
    CaseData with = data;
    (with.requests[request].*tensor)[at] = std::bit_cast<float>(bits);
    return with;
  };
  size_t nan = 0, wanted = 0;
  for (size_t request = 0; request < data.requests.size(); ++request) {
    for (const auto tensor :
         {&test::RequestData::q, &test::RequestData::k, &test::RequestData::v}) {
      for (const size_t at : places(data.requests[request].*tensor)) {
        const uint32_t bits = kNans[nan++ % std::size(kNans)];
        SCOPED_TRACE("request " + std::to_string(request) + ", number " + std::to_string(at) +
                     (tensor == &test::RequestData::q   ? " of q"
                      : tensor == &test::RequestData::k ? " of k"
                                                        : " of v"));
        const CaseData with = put(request, tensor, at, bits);
        const bool values =
            tensor == (test().spec.kind == AttentionKind::mla ? &test::RequestData::k
                                                              : &test::RequestData::v);
        ASSERT_NO_FATAL_FAILURE(
            expect_like(run_reference(test(), with), run(with), values, wanted));
      }
    }
  }
  EXPECT_GT(wanted, 1000u);
}

// Every key is NaN, so no maximum exists.
TEST_P(CpuNumbers, AllKeysNanGiveNan) {
  for (const uint32_t bits : kNans) {
    CaseData data = make_data(test());
    for (test::RequestData& request : data.requests) {
      for (float& value : request.k) value = std::bit_cast<float>(bits);
    }
    const Output got = run(data);
    for (const float value : got.out) ASSERT_TRUE(std::isnan(value));
    for (const float value : got.lse) ASSERT_TRUE(std::isnan(value));
  }
}

INSTANTIATE_TEST_SUITE_P(All, CpuNumbers,
                         ::testing::Combine(::testing::Values(Isa::avx2, Isa::avx512),
                                            ::testing::ValuesIn(cases())),
                         [](const auto& param) {
                           return std::string(isa_name(std::get<0>(param.param))) + "_" +
                                  std::get<1>(param.param).name;
                         });

class CpuLargeScores : public CpuNumbers {};

std::vector<AttentionCase> large_cases() {
  std::vector<AttentionCase> list;
  for (const int32_t dim : {8, 64}) {
    for (const int32_t q_heads : {2, 16}) {
      AttentionCase test = test::mha_case(
          "dim_" + std::to_string(dim) + "_heads_" + std::to_string(q_heads), q_heads, 2, dim);
      list.push_back(shaped(test));
      test.name += "_sinks";
      test.spec.scores.has_sinks = true;
      list.push_back(shaped(test));
    }
  }
  AttentionCase test = test::mha_case("cap", 4, 2, 64);
  test.spec.scores.logit_cap = 0x1p31f;
  list.push_back(shaped(test));
  list.push_back(shaped(test::mla_case("mla", 4)));
  return list;
}

// All scores are one large number. Their weights are equal, however the softmax rounds the number
// times log2(e).
TEST_P(CpuLargeScores, EqualScoresWeighTheSame) {
  CaseData data = make_data(test());
  const double scale = test::softmax_scale(test().spec);
  const auto width = static_cast<size_t>(test::q_width(test().spec));
  std::vector<double> scores = {2.24210611e9, -2.24210611e9};
  for (double score = 3e5; score < 1e25; score *= 3.7) {
    scores.push_back(score);
    scores.push_back(-score);
  }
  for (const double score : scores) {
    SCOPED_TRACE(score);
    for (test::RequestData& request : data.requests) {
      for (size_t i = 0; i < request.q.size(); ++i) {
        request.q[i] = i % width == 0 ? static_cast<float>(score / scale) : 0;
      }
      const size_t key_width = request.k.size() / static_cast<size_t>(request.kv_len);
      const auto kv_heads = static_cast<size_t>(test().spec.kv_heads);
      for (size_t i = 0; i < request.k.size(); ++i) {
        request.k[i] = i % (key_width / kv_heads) == 0 ? 1 : 0;
      }
    }
    const Output want = run_reference(test(), data), got = run(data);
    for (size_t i = 0; i < want.out.size(); ++i) {
      ASSERT_TRUE(test::is_near(got.out[i], want.out[i], 1e-4 * (1 + std::fabs(want.out[i]))))
          << "out " << i;
    }
    for (size_t i = 0; i < want.lse.size(); ++i) {
      ASSERT_TRUE(test::is_near(got.lse[i], want.lse[i], 2e-6 * std::fabs(want.lse[i])))
          << "lse " << i;
    }
  }
}

// The maxima grow from tile to tile, past the size from which on scores are rounded separately.
TEST_P(CpuLargeScores, GrowingScoresTakeTheLargest) {
  if (test().spec.scores.logit_cap > 0) GTEST_SKIP() << "the cap makes them equal";
  CaseData data = make_data(test());
  const auto width = static_cast<size_t>(test::q_width(test().spec));
  const auto kv_heads = static_cast<size_t>(test().spec.kv_heads);
  for (test::RequestData& request : data.requests) {
    for (size_t i = 0; i < request.q.size(); ++i) request.q[i] = i % width == 0 ? 1e6f : 0;
    const size_t key_width = request.k.size() / static_cast<size_t>(request.kv_len) / kv_heads;
    for (size_t i = 0; i < request.k.size(); ++i) {
      const size_t key = i / key_width / kv_heads;
      const float size = static_cast<float>(1 + key / 7);
      request.k[i] = i % key_width == 0 ? size * size * size : 0;
    }
  }
  const Output want = run_reference(test(), data), got = run(data);
  for (size_t i = 0; i < want.out.size(); ++i) {
    ASSERT_TRUE(test::is_near(got.out[i], want.out[i], 1e-4 * (1 + std::fabs(want.out[i]))))
        << "out " << i;
  }
  for (size_t i = 0; i < want.lse.size(); ++i) {
    ASSERT_TRUE(test::is_near(got.lse[i], want.lse[i], 2e-6 * std::fabs(want.lse[i])))
        << "lse " << i;
  }
}

INSTANTIATE_TEST_SUITE_P(All, CpuLargeScores,
                         ::testing::Combine(::testing::Values(Isa::avx2, Isa::avx512),
                                            ::testing::ValuesIn(large_cases())),
                         [](const auto& param) {
                           return std::string(isa_name(std::get<0>(param.param))) + "_" +
                                  std::get<1>(param.param).name;
                         });

}  // namespace
}  // namespace fovea
