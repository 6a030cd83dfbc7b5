// SPDX-License-Identifier: Apache-2.0
// The SIMD attention of every instruction set this processor has, over the whole case list.
#include <gtest/gtest.h>

#include <string>
#include <tuple>
#include <vector>

#include "fovea/error.h"
#include "kernels/cpu/attention.h"
#include "kernels/reference/reference.h"
#include "support/cases.h"
#include "support/expect_close.h"
#include "support/kernel_problem.h"
#include "support/poison.h"

namespace fovea {
namespace {

using kernels::cpu::AttentionShape;
using kernels::cpu::Isa;
using test::AttentionCase;

AttentionShape shape_of(const AttentionSpec& spec, Isa isa, int threads) {
  AttentionShape shape;
  shape.isa = isa;
  shape.threads = threads;
  shape.q_heads = spec.q_heads;
  shape.kv_heads = spec.kv_heads;
  shape.head_dim = spec.head_dim;
  shape.head_dim_v = spec.head_dim_v;
  return shape;
}

// Runs the case in a workspace of exactly the bytes asked for.
test::Output run(const AttentionCase& test, const test::CaseData& data, test::Fill fill, Isa isa,
                 int thread_count) {
  ThreadPool threads(thread_count);
  test::KernelProblem problem(test, data, fill);
  if (const auto write = problem.write_params()) kernels::reference::kv_write(*write);
  const AttentionShape shape = shape_of(test.spec, isa, thread_count);
  const size_t bytes = kernels::cpu::attention_workspace_bytes(shape, test::limits_of(test));
  test::GuardedBuffer workspace(bytes, fill);
  const kernels::AttentionParams params = problem.attention_params();
  const auto schedule = kernels::cpu::plan_attention(shape, params, workspace.bytes());
  kernels::cpu::attention(shape, params, schedule, threads);
  EXPECT_TRUE(workspace.guards_intact());
  EXPECT_TRUE(problem.untouched_outside());
  return problem.output();
}

class CpuAttention : public ::testing::TestWithParam<std::tuple<Isa, AttentionCase>> {
 protected:
  void SetUp() override {
    if (!has_isa(isa())) GTEST_SKIP() << "this processor lacks " << isa_name(isa());
  }
  static Isa isa() { return std::get<0>(GetParam()); }
  static const AttentionCase& test_case() { return std::get<1>(GetParam()); }
};

TEST_P(CpuAttention, MatchesTheOracle) {
  const AttentionCase& test = test_case();
  const test::CaseData data = make_data(test);
  const test::Output got = run(test, data, test::Fill::poison, isa(), 2);
  size_t out_at = 0, lse_at = 0;
  for (size_t request = 0; request < data.requests.size(); ++request) {
    const test::OracleResult want = oracle(test, data, request);
    const std::span<const float> out(got.out.data() + out_at, want.exact.out.size());
    const std::span<const float> lse(got.lse.data() + lse_at,
                                     got.lse.empty() ? 0 : want.exact.lse.size());
    out_at += out.size();
    lse_at += lse.size();
    EXPECT_TRUE(is_close(test.spec, want, out, lse)) << "request " << request;
  }
  EXPECT_EQ(out_at, got.out.size());
}

TEST_P(CpuAttention, PoisonChangesNoBit) {
  const AttentionCase& test = test_case();
  const test::CaseData data = make_data(test);
  EXPECT_TRUE(same_bits(run(test, data, test::Fill::zero, isa(), 2),
                        run(test, data, test::Fill::poison, isa(), 2)));
}

TEST_P(CpuAttention, ThreadsChangeNoBit) {
  const AttentionCase& test = test_case();
  const test::CaseData data = make_data(test);
  const test::Output alone = run(test, data, test::Fill::zero, isa(), 1);
  for (const int threads : {3, 16}) {
    EXPECT_TRUE(same_bits(alone, run(test, data, test::Fill::zero, isa(), threads)));
  }
}

std::vector<AttentionCase> kernel_cases() {
  std::vector<AttentionCase> cases;
  for (AttentionCase& test : test::attention_cases()) {
    if (!test::has_mla_weights(test.spec)) cases.push_back(std::move(test));
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Cases, CpuAttention,
                         ::testing::Combine(::testing::Values(Isa::avx2, Isa::avx512),
                                            ::testing::ValuesIn(kernel_cases())),
                         [](const auto& param) {
                           return std::string(isa_name(std::get<0>(param.param))) + "_" +
                                  std::get<1>(param.param).name;
                         });

}  // namespace
}  // namespace fovea
