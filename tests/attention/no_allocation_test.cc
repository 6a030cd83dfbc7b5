// SPDX-License-Identifier: Apache-2.0
// After reserve(), the CPU backends except `reference` and the GPU backends allocate nothing: the
// test counts calls of the global operator new. Device memory cannot be allocated inside a capture,
// and contract_test captures all backends.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <vector>

#include "kernels/cpu/isa.h"
#include "support/cases.h"
#include "support/count_allocations.h"
#include "support/linear_case.h"
#include "support/run_backend.h"
#include "support/test_device.h"

namespace fovea {
namespace {

using test::allocations;
using test::AttentionCase;

TEST(NoAllocation, TheCounterCounts) {
  const int64_t before = allocations;
  ::operator delete(::operator new(1));  // compilers may drop a new-expression
  EXPECT_EQ(allocations, before + 1);
  std::vector<int> values(1000);
  std::iota(values.rbegin(), values.rend(), 0);
  const int64_t sorts = allocations;
  std::ranges::stable_sort(values);  // allocates by a form that does not throw
  EXPECT_GT(allocations, sorts);
}

// The first test with a pass: the first pass of a process allocates nothing either.
TEST(NoAllocation, LinearLayersAllocateNothing) {
  if (test::on_gpu()) GTEST_SKIP() << "is about the CPU";
  const BackendRegistry registry = BackendRegistry::builtin();
  for (const test::LinearCase& test : test::linear_cases()) {
    const test::LinearData data = test::make_data(test);
    const test::LinearSequence& sequence = data.sequences.front();
    const int32_t length = test.lengths.front(), slot = 1;
    const int32_t heads = test.spec.linear.value_heads, width = test.spec.linear.value_dim;
    const BatchLimits limits{.max_tokens = length, .max_q_len = length, .max_kv_len = length};
    ThreadPool threads(2);
    const auto pool = make_state_pool(test::state_spec(test), 2);
    const auto backend =
        registry.find("linear")->create({test.spec, nullptr, pool.get(), &threads});
    backend->reserve(limits);
    const int32_t q_indptr[] = {0, length};
    const BatchView view{.mode = ForwardMode::extend,
                         .requests = 1,
                         .tokens = length,
                         .q_indptr = q_indptr,
                         .kv_lens = {&length, 1},
                         .linear = {.state_slots = {&slot, 1}}};
    std::vector<float> out(static_cast<size_t>(length) * heads * width);
    LayerTensors layer;
    layer.out = dense_rows(out.data(), DType::f32, heads, width);
    layer.linear = test::convolution_of(test, data, sequence);
    const int64_t before = allocations;
    backend->plan(view);
    if (test::makes_two_calls(test)) backend->forward(layer);
    layer.linear = test::tensors_of(test, data, sequence);
    backend->forward(layer);
    EXPECT_EQ(allocations, before) << test.name;
  }
}

TEST(NoAllocation, PlanAndForwardAllocateNothingOnAGpu) {
  if (!test::on_gpu()) GTEST_SKIP() << "runs with FOVEA_TEST_DEVICE=cuda";
  if (!test::why_no_test_device().empty()) GTEST_SKIP() << test::why_no_test_device();
  const BackendRegistry registry = BackendRegistry::builtin();
  int served = 0;
  for (const BackendEntry& entry : registry.entries()) {
    for (const char* name : {"mixed", "decode_page_16", "encoder", "cross", "window_pool",
                             "mla_bf16", "mla_weights"}) {
      const AttentionCase test = test::attention_case(name);
      if (!entry.reject(test::request_of(test)).empty()) continue;
      ++served;
      const test::CaseData data = test::make_data(test);
      std::optional<test::PagedStore> store;
      if (test::is_cached(test.spec)) store.emplace(test, data, test::Fill::zero);
      test::PagedStore* pages = store ? &*store : nullptr;
      ThreadPool threads(1);
      test::BackendUnderTest under_test(entry, test, pages, threads);
      test::PackedBatch batch(test, data, pages, test::whole_case(test), test::Fill::zero);
      const test::DeviceBatch twin(batch, pages);
      const BatchView view = twin.view();
      const LayerTensors tensors = twin.tensors();
      const auto run = [&] {
        under_test.backend().plan(view);
        under_test.backend().forward(tensors);
        gpu::synchronize(nullptr);
      };
      run();  // the driver loads code at its first launch
      const int64_t before = allocations;
      run();
      EXPECT_EQ(allocations, before) << entry.name << " on " << name;
    }
  }
  EXPECT_GT(served, 0);
}

TEST(NoAllocation, PlanAndForwardAllocateNothing) {
  if (test::on_gpu()) GTEST_SKIP() << "is about the CPU";
  if (kernels::cpu::best_isa() == kernels::cpu::Isa::none) GTEST_SKIP() << "no SIMD kernels";
  const BackendRegistry registry = BackendRegistry::builtin();
  const BackendEntry& entry = *registry.find("cpu");
  for (const AttentionCase& test : test::attention_cases()) {
    if (!entry.reject(test::request_of(test)).empty()) continue;
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
