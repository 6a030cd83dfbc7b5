// SPDX-License-Identifier: Apache-2.0
// After reserve() the fast CPU backend allocates nothing: global operator new is counted.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <new>

#include "kernels/cpu/isa.h"
#include "support/cases.h"
#include "support/run_backend.h"

namespace {
std::atomic<int64_t> allocations{0};

void* counted(size_t size, size_t alignment) {
  ++allocations;
  const size_t rounded = (size + alignment - 1) / alignment * alignment;
  if (void* memory = std::aligned_alloc(alignment, rounded == 0 ? alignment : rounded)) {
    return memory;
  }
  throw std::bad_alloc();
}
}  // namespace

void* operator new(size_t size) { return counted(size, alignof(std::max_align_t)); }
void* operator new[](size_t size) { return counted(size, alignof(std::max_align_t)); }
void* operator new(size_t size, std::align_val_t alignment) {
  return counted(size, static_cast<size_t>(alignment));
}
void* operator new[](size_t size, std::align_val_t alignment) {
  return counted(size, static_cast<size_t>(alignment));
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, size_t, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, size_t, std::align_val_t) noexcept { std::free(memory); }

namespace fovea {
namespace {

using test::AttentionCase;

TEST(NoAllocation, TheCounterCounts) {
  const int64_t before = allocations;
  delete new int(1);
  EXPECT_GT(allocations, before);
}

TEST(NoAllocation, PlanAndForwardAllocateNothing) {
  if (kernels::cpu::best_isa() == kernels::cpu::Isa::none) GTEST_SKIP() << "no SIMD kernels";
  const BackendRegistry registry = BackendRegistry::builtin();
  const BackendEntry& entry = *registry.find("cpu");
  for (const AttentionCase& test : test::attention_cases()) {
    const test::CaseData data = test::make_data(test);
    std::optional<test::PagedStore> store;
    if (test::is_cached(test.spec)) store.emplace(test, data, test::Fill::zero);
    ThreadPool threads(2);
    test::BackendUnderTest under_test(entry, test, store ? &*store : nullptr, threads);
    test::PackedBatch batch(test, data, store ? &*store : nullptr, test::whole_case(test),
                            test::Fill::zero);
    const BatchView view = batch.view();
    const LayerTensors tensors = batch.tensors();
    const int64_t before = allocations;
    under_test.backend().plan(view);
    under_test.backend().forward(tensors);
    EXPECT_EQ(allocations, before) << test.name;
  }
}

}  // namespace
}  // namespace fovea
