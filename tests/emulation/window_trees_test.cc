// SPDX-License-Identifier: Apache-2.0
// Trees of drafts over window pools, whose slots from before the window of the root are NaN, on the
// emulated GPU against the oracle.
#include <gtest/gtest.h>

#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "support/cases.h"
#include "support/expect_close.h"
#include "support/oracle.h"
#include "support/run_backend.h"

namespace fovea {
namespace {

using test::AttentionCase;

// Windows that begin on both sides of an edge of pages and of key tiles, and before the first key.
AttentionCase tree_case(int32_t drafts, int32_t window) {
  AttentionCase test = test::mha_case("tree", 2, 1, 128);
  test.spec.window = window;
  test.window_pool = true;
  test.spec.mask = MaskKind::tree;
  test.mode = ForwardMode::target_verify;
  test.requests = {{drafts, 608}, {drafts, 336}, {0, 0}, {drafts, 70}, {drafts, drafts}};
  return test;
}

class WindowTrees : public ::testing::TestWithParam<std::tuple<const char*, int32_t, int32_t>> {};

TEST_P(WindowTrees, MatchTheOracle) {
  const auto [backend, drafts, window] = GetParam();
  const AttentionCase test = tree_case(drafts, window);
  const test::CaseData data = make_data(test);
  const BackendRegistry registry = BackendRegistry::builtin();
  const test::Output got = run_batches(*registry.find(backend), test, data,
                                       {test::whole_case(test)}, {.fill = test::Fill::poison})
                               .front();
  const auto heads = static_cast<size_t>(test.spec.q_heads);
  const auto width = static_cast<size_t>(test::out_width(test.spec));
  size_t row = 0;
  for (size_t request = 0; request < test.requests.size(); ++request) {
    const size_t rows = static_cast<size_t>(test.requests[request].q_len) * heads;
    const std::span<const float> out(got.out.data() + row * width, rows * width);
    const std::span<const float> lse(got.lse.data() + row, rows);
    EXPECT_TRUE(is_close(test.spec, oracle(test, data, request), out, lse))
        << "request " << request;
    row += rows;
  }
}

std::string name_of(const ::testing::TestParamInfo<WindowTrees::ParamType>& given) {
  const auto [backend, drafts, window] = given.param;
  return std::string(backend) + "_" + std::to_string(drafts) + "_drafts_" + std::to_string(window);
}

INSTANTIATE_TEST_SUITE_P(Portable, WindowTrees,
                         ::testing::Combine(::testing::Values("portable"),
                                            ::testing::Values(2, 4, 24),
                                            ::testing::Values(1, 16, 100, 333)),
                         name_of);
#if FOVEA_EMULATE_MORE
INSTANTIATE_TEST_SUITE_P(Flash, WindowTrees,
                         ::testing::Combine(::testing::Values("flash"), ::testing::Values(2, 4, 24),
                                            ::testing::Values(1, 16, 100, 333)),
                         name_of);
#endif

}  // namespace
}  // namespace fovea
