// SPDX-License-Identifier: Apache-2.0
// Every combination of dtype, head grouping, phase and head dim, and long extends over every page
// size, compared with the oracle. The list of cases only samples these.
#include <fmt/core.h>
#include <gtest/gtest.h>

#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "fovea/dtype.h"
#include "support/cases.h"
#include "support/expect_close.h"
#include "support/run_backend.h"
#include "support/served_case.h"
#include "support/test_device.h"

namespace fovea {
namespace {

using test::AttentionCase;
using test::ServedCase;

void add_phases(AttentionCase test, DType dtype, std::vector<AttentionCase>& cases) {
  struct Phase {
    const char* name;
    ForwardMode mode;
    std::vector<test::RequestShape> requests;
  };
  static const std::vector<Phase> phases = {
      {"decode", ForwardMode::decode, {{1, 1}, {1, 17}, {1, 97}}},
      {"prefill", ForwardMode::extend, {{33, 33}, {1, 1}, {70, 70}}},
      {"mixed", ForwardMode::mixed, {{1, 97}, {5, 70}, {3, 3}, {0, 0}, {20, 150}}},
      {"verify", ForwardMode::target_verify, {{4, 60}, {4, 4}, {4, 33}}},
  };
  test.spec.q_dtype = test.cache.dtype = dtype;
  const std::string name = test.name;
  for (const Phase& phase : phases) {
    test.name = fmt::format("{}_{}_{}", name, dtype_name(dtype), phase.name);
    test.mode = phase.mode;
    test.requests = phase.requests;
    test.spec.mask = phase.mode == ForwardMode::target_verify ? MaskKind::tree : MaskKind::none;
    cases.push_back(test);
  }
}

std::vector<AttentionCase> grid() {
  std::vector<AttentionCase> cases;
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (const int32_t dim : {64, 80, 96, 128, 192, 256}) {
      for (const auto& [heads, q_heads, kv_heads] :
           {std::tuple{"mha", 4, 4}, {"gqa_4", 8, 2}, {"gqa_8", 16, 2}, {"mqa", 8, 1}}) {
        add_phases(test::mha_case(fmt::format("{}_{}", heads, dim), q_heads, kv_heads, dim), dtype,
                   cases);
      }
    }
    add_phases(test::mla_case("mla", 16), dtype, cases);
  }
  for (const int32_t page_size : {1, 2, 3, 16, 32, 64, 128, 256}) {
    AttentionCase test = test::mha_case(fmt::format("long_extend_page_{}", page_size), 4, 2, 64);
    test.mode = ForwardMode::extend;
    test.cache.page_size = page_size;
    test.requests = {{25, 1023}, {28, 4097}};
    cases.push_back(test);
  }
  return cases;
}

class Grid : public ::testing::TestWithParam<ServedCase> {};

TEST_P(Grid, MatchesTheOracle) {
  const auto& [entry, test] = GetParam();
  const test::CaseData data = make_data(test);
  const test::Output got = run_case(entry, test, data, {.fill = test::Fill::poison});
  const auto heads = static_cast<size_t>(test.spec.q_heads);
  const auto width = static_cast<size_t>(test::out_width(test.spec));
  size_t row = 0;
  for (size_t request = 0; request < test.requests.size(); ++request) {
    const size_t rows = static_cast<size_t>(test.requests[request].q_len) * heads;
    EXPECT_TRUE(is_close(test.spec, oracle(test, data, request),
                         std::span(got.out).subspan(row * width, rows * width),
                         std::span(got.lse).subspan(row, rows)))
        << "request " << request;
    row += rows;
  }
  EXPECT_EQ(got.lse.size(), row);
}

TEST_P(Grid, WithoutLseTheOutputHasTheSameBits) {
  const auto& [entry, asked] = GetParam();
  AttentionCase test = asked;
  test.spec.needs_lse = false;
  const test::CaseData data = make_data(test);
  const test::Output got = run_case(entry, test, data, {.fill = test::Fill::poison});
  EXPECT_TRUE(got.lse.empty());
  EXPECT_EQ(got.out, run_case(entry, asked, data).out);
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(Grid);
INSTANTIATE_TEST_SUITE_P(Builtin, Grid, ::testing::ValuesIn(test::served_cases(grid())),
                         test::served_case_name);

TEST(GridCases, AreServedByBothBackendsOfACpu) {
  if (test::on_gpu()) GTEST_SKIP() << "no GPU kernel computes on fp32";
  EXPECT_EQ(test::served_cases(grid()).size(), 2 * grid().size());
}

}  // namespace
}  // namespace fovea
