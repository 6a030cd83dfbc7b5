// SPDX-License-Identifier: Apache-2.0
// The batch of a rank that has a part of each context. Skipped without a GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "fovea/context_parallel.h"
#include "kernels/cuda/portable/context/launch.h"
#include "support/device_array.h"
#include "support/gpu_kernel_test.h"

namespace fovea::kernels::cuda {
namespace {

using test::to_device;
using test::to_host;

constexpr int32_t kPageSize = 16, kWidePages = 5, kPadding = 3, kUnset = -7;

size_t index(int64_t i) { return static_cast<size_t>(i); }

// A batch over a table of slots, and its translation to one rank.
class Plan {
 public:
  Plan(const ContextShards& shards, int32_t classes, std::vector<int32_t> q_lens,
       std::vector<int32_t> kv_lens)
      : shards_(shards),
        classes_(classes),
        q_lens_(std::move(q_lens)),
        kv_lens_(std::move(kv_lens)) {
    table_.resize(index(requests() * kWidePages * wide()));
    for (int32_t i = 0; i < requests(); ++i) {
      indptr_.push_back(indptr_.back() + q_lens_[index(i)]);
      rows_.push_back(requests() - 1 - i);
      for (int64_t t = 0; t < kWidePages * wide(); ++t) {
        const int64_t page = (int64_t{rows_.back()} * kWidePages + t / wide()) * 7 % 101 + 1;
        table_[index(rows_.back() * kWidePages * wide() + t)] =
            static_cast<int32_t>(page * wide() + t % wide());
      }
    }
    for (int32_t i = 0; i < requests(); ++i) {
      for (int32_t j = 0; j < q_lens_[index(i)]; ++j) {
        const int64_t position = kv_lens_[index(i)] - q_lens_[index(i)] + j;
        slots_.push_back(j % 4 == 3 ? -1 : slot(i, position));
      }
    }
    slots_.resize(index(tokens()), 5);
  }

  void run(const ContextPlan& kernel, int32_t rank) {
    const auto indptr = to_device(indptr_), lens = to_device(kv_lens_), rows = to_device(rows_),
               table = to_device(table_), slots = to_device(slots_);
    const auto unset = [](int64_t count) {
      return to_device(std::vector<int32_t>(index(count), kUnset));
    };
    const auto l_indptr = unset(local() + 1), l_lens = unset(local()), l_rows = unset(local()),
               l_order = unset(tokens()), l_pages = unset(requests() * kWidePages);
    const auto l_slots = to_device(std::vector<int64_t>(index(tokens()), kUnset));
    ContextPlanParams params{};
    params.q_indptr = indptr.data<int32_t>();
    params.kv_lens = lens.data<int32_t>();
    params.request_rows = rows.data<int32_t>();
    params.table = table.data<int32_t>();
    params.table_stride = kWidePages * wide();
    params.entry_tokens = 1;
    params.out_slots = slots.data<int64_t>();
    params.requests = requests();
    params.tokens = tokens();
    params.rank = rank;
    params.ranks = shards_.ranks;
    params.interleave = shards_.interleave;
    params.page_size = kPageSize;
    params.classes = classes_;
    params.local_indptr = l_indptr.data<int32_t>();
    params.local_lens = l_lens.data<int32_t>();
    params.local_rows = l_rows.data<int32_t>();
    params.order = l_order.data<int32_t>();
    params.slots = l_slots.data<int64_t>();
    params.pages = l_pages.data<int32_t>();
    params.pages_stride = kWidePages;
    kernel.run(params, nullptr);
    local_indptr_ = to_host<int32_t>(l_indptr, index(local() + 1));
    local_lens_ = to_host<int32_t>(l_lens, index(local()));
    local_rows_ = to_host<int32_t>(l_rows, index(local()));
    order_ = to_host<int32_t>(l_order, index(tokens()));
    local_slots_ = to_host<int64_t>(l_slots, index(tokens()));
    pages_ = to_host<int32_t>(l_pages, index(requests() * kWidePages));
  }

  // A row of a local request sees its keys as causal attention counts them.
  void expect_rows(int32_t rank) const {
    EXPECT_EQ(local_indptr_.back(), classes_ == 0 ? tokens() : indptr_.back());
    std::vector<int32_t> sorted = order_;
    std::ranges::sort(sorted);
    for (int32_t i = 0; i < tokens(); ++i) ASSERT_EQ(sorted[index(i)], i);
    for (int32_t g = 0; g < local(); ++g) {
      const int32_t begin = local_indptr_[index(g)], end = local_indptr_[index(g + 1)];
      ASSERT_LE(begin, end);
      for (int32_t row = begin; row < end; ++row) {
        const int32_t token = order_[index(row)];
        const int32_t seen = std::max(0, local_lens_[index(g)] - (end - 1 - row));
        if (token >= indptr_.back()) {
          EXPECT_EQ(seen, 0);
          continue;
        }
        const auto i = std::ranges::upper_bound(indptr_, token) - indptr_.begin() - 1;
        EXPECT_EQ(local_rows_[index(g)], i);
        const int64_t position = int64_t{kv_lens_[index(i)]} - indptr_[index(i + 1)] + token;
        EXPECT_EQ(seen, shards_.visible_length(position, rank)) << "position " << position;
      }
    }
  }

  void expect_places(int32_t rank) const {
    for (int32_t t = 0; t < tokens(); ++t) {
      const bool exists = t < indptr_.back();
      EXPECT_EQ(local_slots_[index(t)],
                exists ? shards_.local_slot(slots_[index(t)], kPageSize, rank) : -1);
    }
    for (int32_t i = 0; i < requests(); ++i) {
      const int64_t count =
          (shards_.local_length(kv_lens_[index(i)], rank) + kPageSize - 1) / kPageSize;
      for (int64_t page = 0; page < kWidePages; ++page) {
        EXPECT_EQ(pages_[index(i * kWidePages + page)],
                  page < count ? slot(i, page * wide()) / wide() : kUnset);
      }
    }
  }

 private:
  int64_t wide() const { return int64_t{kPageSize} * shards_.ranks; }
  int32_t requests() const { return static_cast<int32_t>(q_lens_.size()); }
  int32_t tokens() const { return indptr_.back() + kPadding; }
  int32_t local() const { return classes_ == 0 ? tokens() : requests() * classes_; }
  int64_t slot(int32_t request, int64_t position) const {
    return table_[index(rows_[index(request)] * kWidePages * wide() + position)];
  }

  ContextShards shards_;
  int32_t classes_;
  std::vector<int32_t> q_lens_, kv_lens_, indptr_ = {0}, rows_, table_;
  std::vector<int64_t> slots_;
  std::vector<int32_t> local_indptr_, local_lens_, local_rows_, order_, pages_;
  std::vector<int64_t> local_slots_;
};

class GpuContextPlan : public test::GpuKernelTest<::testing::Test> {};

TEST_F(GpuContextPlan, BatchesBecomeThoseOfARank) {
  const ContextPlan kernel(context->info().sm, *store);
  const std::vector<int32_t> extends = {0, 1, 2, 5, 17, 40}, lengths = {0, 1, 2, 30, 17, 61};
  const std::vector<int32_t> ones = {1, 1, 0, 1, 1}, decodes = {1, 2, 0, 33, 64};
  for (const int32_t ranks : {1, 2, 3, 8}) {
    for (int32_t rank = 0; rank < ranks; ++rank) {
      std::vector<Plan> plans = {Plan({ranks, 1}, ranks, extends, lengths)};
      for (const int32_t interleave : {1, 2, 16}) {
        plans.emplace_back(ContextShards{ranks, interleave}, 1, ones, decodes);
        plans.emplace_back(ContextShards{ranks, interleave}, 0, extends, lengths);
      }
      for (size_t i = 0; i < plans.size(); ++i) {
        SCOPED_TRACE(testing::Message() << "rank " << rank << " of " << ranks << ", plan " << i);
        plans[i].run(kernel, rank);
        plans[i].expect_rows(rank);
        plans[i].expect_places(rank);
      }
    }
  }
}

}  // namespace
}  // namespace fovea::kernels::cuda
