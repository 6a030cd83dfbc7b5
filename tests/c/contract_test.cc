// SPDX-License-Identifier: Apache-2.0
// Every case of the contract gives the same bits and the same cache through the C interface.
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>

#include "c/through_c.h"
#include "support/cases.h"
#include "support/run_backend.h"
#include "support/test_device.h"

namespace fovea::test {
namespace {

struct Outcome {
  Output output;
  std::optional<PagedStore> store;
};

void run(Outcome& outcome, const BackendEntry& entry, const AttentionCase& test,
         const CaseData& data, Tables tables) {
  ThreadPool threads(2);
  if (is_cached(test.spec)) outcome.store.emplace(test, data, Fill::zero);
  PagedStore* const store = outcome.store ? &*outcome.store : nullptr;
  BackendUnderTest under_test(entry, test, store, threads);
  PackedBatch batch(test, data, store, whole_case(test), Fill::zero);
  batch.give(tables);
  batch.tell_host_lens();
  under_test.run(batch);
  outcome.output = batch.output();
}

class ContractThroughC : public ::testing::TestWithParam<AttentionCase> {};

TEST_P(ContractThroughC, GivesTheSameBits) {
  if (!why_no_test_device().empty()) GTEST_SKIP() << why_no_test_device();
  const AttentionCase& test = GetParam();
  const CaseData data = make_data(test);
  const BackendRegistry registry = BackendRegistry::builtin();
  const BackendRequest request = request_of(test, /*threads=*/2);
  const auto entry = std::ranges::find_if(
      registry.entries(), [&](const BackendEntry& e) { return e.reject(request).empty(); });
  if (entry == registry.entries().end()) GTEST_SKIP() << "no backend of this device accepts it";
  // Both kinds of tables occur often.
  const Tables tables = test.name.size() % 2 == 0 ? Tables::slots : Tables::pages;
  Outcome direct, through;
  run(direct, *entry, test, data, tables);
  run(through, through_c(*entry, request), test, data, tables);
  EXPECT_TRUE(same_bits(direct.output, through.output)) << entry->name;
  if (direct.store) {
    EXPECT_TRUE(direct.store->pool().same_content(through.store->pool())) << entry->name;
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, ContractThroughC, ::testing::ValuesIn(attention_cases()),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace fovea::test
