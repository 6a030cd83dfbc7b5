// SPDX-License-Identifier: Apache-2.0
// BatchHints::host_q_lens and host_kv_lens in `mla` and `portable_mla`. Skipped without a GPU that
// runs them.
#include <gtest/gtest.h>

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "fovea/gpu.h"
#include "fovea/select_backend.h"
#include "gpu/gpu.h"
#include "support/cases.h"
#include "support/expect_close.h"
#include "support/run_backend.h"

namespace fovea {
namespace {

class MlaHostLens : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (!why_no_gpu().empty()) GTEST_SKIP() << why_no_gpu();
    const int sm = gpu::Context(0).info().sm;
    if (GetParam() == std::string("mla") && sm != 90) GTEST_SKIP() << "not a Hopper GPU";
    if (sm < 80) GTEST_SKIP() << "a GPU before Ampere";
  }
};

// The lengths that the host gives may be far above the true ones.
TEST_P(MlaHostLens, MayBeLoose) {
  test::AttentionCase test = test::mla_case("loose", 3);
  test.spec.mla.nope_dim = test.spec.mla.v_dim = 128;
  test.spec.scores.softmax_scale = 0;
  test.cache.page_size = 64;
  const BackendEntry entry = *BackendRegistry::builtin().find(GetParam());
  // Decodes together with prompts; prompts alone, one of which has as few tokens as a decode;
  // extends of more tokens than a prompt, which the host cannot distinguish from it.
  for (const std::vector<test::RequestShape>& requests :
       {std::vector<test::RequestShape>{{1, 300}, {170, 1800}, {20, 30}, {1, 1}, {64, 64}},
        {{20, 20}, {175, 175}, {64, 70}},
        {{1, 300}, {100, 900}, {20, 20}, {200, 1700}}}) {
    test.requests = requests;
    const test::CaseData data = make_data(test);
    const std::vector<test::Piece> whole = whole_case(test);
    std::vector<test::Piece> shorter = whole;
    for (size_t i = 0; i < shorter.size(); ++i) {
      if (i % 3 == 0) shorter[i].end = 1;
      if (i % 3 == 1) shorter[i].end = shorter[i].end / 3;
    }
    ThreadPool threads(1);
    test::PagedStore store(test, data, test::Fill::zero);
    test::BackendUnderTest under_test(entry, test, &store, threads);
    const test::PackedBatch longest(test, data, &store, whole, test::Fill::poison);
    for (const auto& pieces : {whole, shorter}) {
      test::PackedBatch batch(test, data, &store, pieces, test::Fill::poison);
      batch.take_bounds(longest);
      batch.tell_host_lens();
      under_test.run(batch);
      const test::Output got = batch.output();
      size_t row = 0;
      for (const test::Piece& piece : pieces) {
        const test::OracleResult all = oracle(test, data, piece.request);
        const size_t count = static_cast<size_t>(piece.end) * 3;
        const auto first = [&](const test::Expected& rows) {
          return test::Expected{{rows.out.begin(), rows.out.begin() + count * 128},
                                {rows.lse.begin(), rows.lse.begin() + count}};
        };
        EXPECT_TRUE(test::is_close(test.spec,
                                   {first(all.exact), first(all.plain), all.rounded_keys},
                                   std::span(got.out).subspan(row * 128, count * 128),
                                   std::span(got.lse).subspan(row, count)))
            << "request " << piece.request << ", " << piece.end << " new tokens";
        row += count;
      }
    }
    EXPECT_TRUE(under_test.guards_intact());
  }
}

INSTANTIATE_TEST_SUITE_P(Both, MlaHostLens, ::testing::Values("mla", "portable_mla"),
                         [](const auto& test) { return std::string(test.param); });

}  // namespace
}  // namespace fovea
