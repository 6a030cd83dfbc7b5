// SPDX-License-Identifier: Apache-2.0
// After reserve, plan and forward allocate nothing in the C interface either.
#include <gtest/gtest.h>

#include <optional>

#include "c/through_c.h"
#include "support/cases.h"
#include "support/count_allocations.h"
#include "support/run_backend.h"
#include "support/test_device.h"

namespace fovea::test {
namespace {

TEST(NoAllocationInC, PlanAndForward) {
  if (on_gpu()) GTEST_SKIP() << "is about the CPU";
  const BackendRegistry registry = BackendRegistry::builtin();
  const BackendEntry& entry = *registry.find("cpu");
  int served = 0;
  for (const AttentionCase& test : attention_cases()) {
    const BackendRequest request = request_of(test, /*threads=*/2);
    if (!entry.reject(request).empty()) continue;
    ++served;
    const CaseData data = make_data(test);
    std::optional<PagedStore> store;
    if (is_cached(test.spec)) store.emplace(test, data, Fill::zero);
    ThreadPool threads(2);
    BackendUnderTest under_test(through_c(entry, request), test, store ? &*store : nullptr,
                                threads);
    PackedBatch batch(test, data, store ? &*store : nullptr, whole_case(test), Fill::zero);
    const BatchView view = batch.view();
    const LayerTensors tensors = batch.tensors();
    const int64_t before = allocations;
    under_test.backend().plan(view, nullptr);
    under_test.backend().forward(tensors, nullptr);
    EXPECT_EQ(allocations, before) << test.name;
  }
  EXPECT_GT(served, 0);
}

// The calls of a scheduler take slots and pages many times a second.
TEST(NoAllocationInC, TablesAndAllocators) {
  constexpr int32_t kTokens = 10000;
  fovea_request_table* table = nullptr;
  fovea_page_allocator* allocator = nullptr;
  ASSERT_EQ(fovea_request_table_create(4, kTokens, &table), FOVEA_OK);
  ASSERT_EQ(fovea_page_allocator_create(2000, 16, &allocator), FOVEA_OK);
  std::vector<int64_t> slots(kTokens), pages(1000);
  const int64_t before = allocations;
  int32_t row = 0, *entries = nullptr;
  EXPECT_EQ(fovea_request_table_allocate(table, &row), FOVEA_OK);
  EXPECT_EQ(fovea_request_table_row(table, row, &entries), FOVEA_OK);
  EXPECT_EQ(fovea_page_allocator_extend(allocator, 0, kTokens, -1, slots.data()), FOVEA_OK);
  for (int32_t i = 0; i < kTokens; ++i) entries[i] = static_cast<int32_t>(slots[i]);
  EXPECT_EQ(fovea_page_allocator_truncate(allocator, entries, kTokens, 5), FOVEA_OK);
  EXPECT_EQ(fovea_page_allocator_allocate(allocator, 1000, pages.data()), FOVEA_OK);
  for (const int64_t page : pages)
    EXPECT_EQ(fovea_page_allocator_release(allocator, page), FOVEA_OK);
  EXPECT_EQ(fovea_request_table_release(table, row), FOVEA_OK);
  EXPECT_EQ(allocations, before);
  fovea_page_allocator_destroy(allocator);
  fovea_request_table_destroy(table);
}

}  // namespace
}  // namespace fovea::test
