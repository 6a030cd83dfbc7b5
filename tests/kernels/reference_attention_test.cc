// SPDX-License-Identifier: Apache-2.0
// The reference against the oracle, which shares no code with it, over the whole case list.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "kernels/reference/reference.h"
#include "support/cases.h"
#include "support/expect_close.h"
#include "support/kernel_problem.h"

namespace fovea {
namespace {

using test::AttentionCase;

class ReferenceAttention : public ::testing::TestWithParam<AttentionCase> {};

test::Output run(const AttentionCase& test, const test::CaseData& data, test::Fill fill) {
  ThreadPool threads(2);
  test::KernelProblem problem(test, data, fill);
  if (const auto write = problem.write_params()) kernels::reference::kv_write(*write);
  kernels::reference::attention(problem.attention_params(), threads);
  EXPECT_TRUE(problem.untouched_outside());
  if (problem.store()) {
    const test::PagedStore want(test, data, fill, test::Written::all);
    EXPECT_TRUE(test.page_stride != 0 || problem.store()->pool().same_content(want.pool()));
  }
  return problem.output();
}

TEST_P(ReferenceAttention, MatchesTheOracle) {
  const AttentionCase& test = GetParam();
  const test::CaseData data = make_data(test);
  const test::Output got = run(test, data, test::Fill::poison);
  size_t out_at = 0, lse_at = 0;
  for (size_t request = 0; request < data.requests.size(); ++request) {
    const test::OracleResult want = oracle(test, data, request);
    const std::span<const float> out(got.out.data() + out_at, want.exact.out.size());
    const std::span<const float> lse(got.lse.data() + lse_at, want.exact.lse.size());
    out_at += out.size();
    lse_at += lse.size();
    EXPECT_TRUE(is_close(test.spec, want, out, lse)) << "request " << request;
  }
  EXPECT_EQ(out_at, got.out.size());
}

TEST_P(ReferenceAttention, PoisonChangesNoBit) {
  const AttentionCase& test = GetParam();
  const test::CaseData data = make_data(test);
  EXPECT_TRUE(same_bits(run(test, data, test::Fill::zero), run(test, data, test::Fill::poison)));
}

INSTANTIATE_TEST_SUITE_P(Cases, ReferenceAttention, ::testing::ValuesIn(test::kernel_cases()),
                         [](const auto& param) { return param.param.name; });

// More new tokens than keys: the first rows see nothing.
TEST(ReferenceAttentionEdges, QueriesBeforeTheFirstKeyAreEmpty) {
  ThreadPool threads(1);
  float q[3] = {1, 1, 1}, k[2] = {0.5f, 1}, v[2] = {3, 5}, out[3], lse[3];
  const int32_t q_indptr[2] = {0, 3}, kv_indptr[2] = {0, 2}, kv_lens[1] = {2};
  kernels::AttentionParams params;
  params.q = dense_rows(q, DType::f32, 1, 1);
  params.keys.k = dense_rows(k, DType::f32, 1, 1);
  params.keys.v = dense_rows(v, DType::f32, 1, 1);
  params.keys.kv_indptr = kv_indptr;
  params.out = dense_rows(out, DType::f32, 1, 1);
  params.lse = lse;
  params.requests = params.q_heads = params.kv_heads = params.head_dim = params.head_dim_v = 1;
  params.q_indptr = q_indptr;
  params.kv_lens = kv_lens;
  kernels::reference::attention(params, threads);
  EXPECT_EQ(out[0], 0);
  EXPECT_EQ(lse[0], -std::numeric_limits<float>::infinity());
  EXPECT_EQ(out[1], 3);
  EXPECT_EQ(lse[1], 0.5f);
  // Weights e^0.5 and e^1.
  const double weight = 1 / (1 + std::exp(-0.5));
  EXPECT_FLOAT_EQ(out[2], static_cast<float>(3 * (1 - weight) + 5 * weight));
  EXPECT_FLOAT_EQ(lse[2], static_cast<float>(std::log(std::exp(0.5) + std::exp(1.0))));
}

}  // namespace
}  // namespace fovea
