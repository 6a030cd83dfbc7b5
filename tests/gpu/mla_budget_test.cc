// SPDX-License-Identifier: Apache-2.0
// MLA passes that would need more workspace than allowed. Skipped without a GPU.
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <span>
#include <string>

#include "attention/backends/backends.h"
#include "attention/cuda/mla_backend.h"
#include "fovea/gpu.h"
#include "gpu/gpu.h"
#include "support/cases.h"
#include "support/expect_close.h"
#include "support/oracle.h"
#include "support/run_backend.h"

namespace fovea {
namespace {

// Returns the backend with this much room for up-projected keys and values.
BackendEntry with_room(const MlaKernels& kernels, const std::optional<UpProjectedRoom>& room) {
  BackendEntry entry = *BackendRegistry::builtin().find(kernels.name);
  entry.workspace_bytes = [&kernels, room](const BackendRequest& request) {
    return mla_workspace_bytes(kernels, request.spec, request.cache, request.device, request.limits,
                               room);
  };
  entry.create = [&kernels, room](const BackendContext& context) {
    return make_mla_backend(kernels, context, room);
  };
  return entry;
}

class MlaBudget : public ::testing::TestWithParam<const MlaKernels*> {
 protected:
  void SetUp() override {
    if (!why_no_gpu().empty()) GTEST_SKIP() << why_no_gpu();
    context_ = std::make_unique<gpu::Context>(0);
    const int sm = context_->info().sm;
    if (GetParam() == &mla_kernels() && sm != 90) GTEST_SKIP() << "not a Hopper GPU";
    if (sm < 80) GTEST_SKIP() << "a GPU before Ampere";
  }

  std::unique_ptr<gpu::Context> context_;
};

// One head after another, and two at a time: absorbed, up-projected at once and in chunks, and
// captured.
TEST_P(MlaBudget, PassesBeyondTheBudgetAreCut) {
  for (const auto& room : {std::optional<UpProjectedRoom>(), {UpProjectedRoom{504, 504}}}) {
    for (const bool split : {false, true}) {
      test::AttentionCase test = test::mla_case(split ? "split_q_strided" : "joined", 4);
      test.spec.mla.nope_dim = test.spec.mla.v_dim = 128;
      test.spec.scores.softmax_scale = 0;
      test.spec.needs_lse = false;
      test.split_q = test.strided = split;
      test.mode = ForwardMode::mixed;
      test.requests = {{170, 900}, {3, 50}, {1, 300}, {20, 30}, {0, 0}, {135, 165}};
      const BackendEntry entry = with_room(*GetParam(), room);
      const test::CaseData data = make_data(test);
      const auto bytes = [&](int64_t budget) {
        test.workspace_budget = budget;
        return static_cast<int64_t>(entry.workspace_bytes(
            {test.spec, test::complete_cache(test), test::limits_of(test), context_->info()}));
      };
      const int64_t all = bytes(int64_t{1} << 40), least = bytes(0);
      EXPECT_LT(least, all);
      for (const int64_t budget : {int64_t{0}, all - least, 2 * (all - least), all}) {
        test.workspace_budget = budget;
        const test::Output got = run_case(entry, test, data, {.fill = test::Fill::poison});
        size_t row = 0;
        for (size_t request = 0; request < test.requests.size(); ++request) {
          const size_t count = static_cast<size_t>(test.requests[request].q_len) * 4;
          EXPECT_TRUE(is_close(test.spec, oracle(test, data, request),
                               std::span(got.out).subspan(row * 128, count * 128), {}))
              << test.name << ", budget " << budget << " of " << all << ", request " << request;
          row += count;
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Both, MlaBudget,
                         ::testing::Values(&mla_kernels(), &portable_mla_kernels()),
                         [](const auto& test) { return std::string(test.param->name); });

}  // namespace
}  // namespace fovea
