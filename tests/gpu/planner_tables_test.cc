// SPDX-License-Identifier: Apache-2.0
// The further output of a planner besides its work list: page tables, and the groups of requests
// that share a prefix.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <span>
#include <tuple>
#include <vector>

#include "attention/prefix_levels.h"
#include "gpu/gpu.h"
#include "gpu/planner_batches.h"
#include "kernels/cuda/common/joint_plan_params.h"
#include "kernels/cuda/common/plan_kernel_params.h"
#include "kernels/cuda/common/prefill_params.h"
#include "kernels/cuda/common/prefix_params.h"

namespace fovea::kernels::cuda {
namespace {

// Blocks after the ordering blocks write the page table, in any number: from slots or pages,
// through a slot map, with page 0 for entries that name nothing of the pool, zeros up to the key
// tile, and nothing after it.
TEST_P(Planners, PageTableIsThatOfTheTokens) {
  constexpr int32_t kSlots = 4008, kUntouched = 0x5a5a5a5a;
  const auto requests = static_cast<size_t>(params.requests);
  const std::vector<int32_t> lens = kv_lens->read();
  const int32_t longest = std::ranges::max(lens);
  std::mt19937 random(5);
  std::vector<int32_t> rows(requests), given(requests * static_cast<size_t>(longest + 1));
  std::iota(rows.rbegin(), rows.rend(), 0);
  std::vector<int64_t> map(kSlots);
  for (int64_t& slot : map) slot = static_cast<int64_t>(random() % kSlots) - 3;
  const Guarded<int32_t> rows_device(rows);
  const Guarded<int64_t> map_device(map);
  const Guarded<PrefillOrder> order(size_t{1});
  const Guarded<PrefillTile> tiles(static_cast<size_t>(q_indptr_host.back()));
  const Kernel plan = load("sm90/prefill_order", {"256", "whole"});
  for (const auto& [page_size, blocks, mapped, pages] :
       {std::tuple{1, 200, false, false}, std::tuple{16, 3, true, false},
        std::tuple{24, 1, false, false}, std::tuple{8, 3, true, true},
        std::tuple{24, 2, false, true}}) {
    SCOPED_TRACE(page_size);
    const int32_t entry_tokens = pages ? page_size : 1;
    const int32_t end = kSlots / entry_tokens;
    for (int32_t& entry : given) entry = static_cast<int32_t>(random() % (end + 40)) - 20;
    const Guarded<int32_t> given_device(given);
    const int32_t stride = (longest + kTableKeys) / page_size + 1;
    const Guarded<int32_t> table(requests * static_cast<size_t>(stride));
    PlanKernelParams<PrefillOrderParams> launch{{.batch = params,
                                                 .order = order.data(),
                                                 .tiles = tiles.data(),
                                                 .tokens_per_tile = 1,
                                                 .heads_shift = 0,
                                                 .token_bytes = 512},
                                                {{.given = given_device.data(),
                                                  .given_stride = longest + 1,
                                                  .given_end = end,
                                                  .gives_pages = pages,
                                                  .request_rows = rows_device.data(),
                                                  .kv_lens = params.kv_lens,
                                                  .slot_map = mapped ? map_device.data() : nullptr,
                                                  .page_table = table.data(),
                                                  .page_table_stride = stride,
                                                  .requests = params.requests,
                                                  .page_size = page_size}},
                                                blocks};
    plan.launch({1 + static_cast<uint32_t>(blocks)}, launch, nullptr);
    std::vector<int32_t> want(table.read().size(), kUntouched);
    for (size_t i = 0; i < requests; ++i) {
      const int32_t padded = (lens[i] + kTableKeys - 1) / kTableKeys * kTableKeys;
      for (int32_t page = 0; page < (padded + page_size - 1) / page_size; ++page) {
        const int32_t last = std::min((page + 1) * page_size, lens[i]) - 1;
        int64_t slot = -1;
        if (page * page_size < lens[i]) {
          const int64_t entry =
              given[static_cast<size_t>(rows[i] * (longest + 1) + last / entry_tokens)];
          if (entry >= 0 && entry < end) slot = entry * entry_tokens + last % entry_tokens;
        }
        if (mapped && slot >= 0) slot = map[static_cast<size_t>(slot)];
        want[i * static_cast<size_t>(stride) + static_cast<size_t>(page)] =
            static_cast<int32_t>(std::max<int64_t>(slot, 0) / page_size);
      }
    }
    EXPECT_EQ(table.read(), want);
  }
}

// The result of find_prefix_levels() for a batch.
struct HostGroups {
  HostGroups(const BatchView& batch, const PrefixRule& rule) : q_indptr(batch.q_indptr.data()) {
    const auto requests = static_cast<size_t>(batch.requests);
    std::vector<PrefixLevel> levels;
    arrays.reserve(3 * kPrefixLevels + 1);
    for (int32_t i = 0; i < kPrefixLevels; ++i) {
      levels.push_back({arrays.emplace_back(requests + 1).data(),
                        arrays.emplace_back(requests).data(),
                        arrays.emplace_back(requests).data()});
    }
    int32_t* first_keys = arrays.emplace_back(requests).data();
    used = static_cast<size_t>(find_prefix_levels(batch, rule, levels, first_keys));
  }

  // Returns the first request of each request's group. The tokens of a group are those of its first
  // request.
  std::vector<int32_t> begins(size_t level) const {
    const std::vector<int32_t>& indptr = arrays[3 * level];
    std::vector<int32_t> all;
    for (size_t i = 0; i + 1 < indptr.size(); ++i) {
      const bool joins = indptr[i] == indptr[i + 1] && q_indptr[i] < q_indptr[i + 1];
      all.push_back(joins ? all.back() : static_cast<int32_t>(i));
    }
    return all;
  }

  const int32_t* q_indptr;
  std::vector<std::vector<int32_t>> arrays;  // three per level, then the first keys
  size_t used = 0;                           // levels
};

// The device finds the groups that the host finds.
TEST_P(Planners, PrefixGroupsAreThoseOfTheHost) {
  if (batch().max_planned_q_len > 0 || batch().window > 0)
    GTEST_SKIP() << "not where prefixes are shared";
  const auto requests = static_cast<size_t>(params.requests);
  std::mt19937 random(9);
  std::vector<int32_t> shared(requests), lens = kv_lens->read();
  for (int32_t& tokens : shared) {
    tokens = random() % 4 == 0 ? 0 : static_cast<int32_t>(random() % 3000);
  }
  constexpr int32_t kMaxQLen = 2, kMinSaved = 5000;
  BatchView view;
  view.requests = params.requests;
  view.q_indptr = q_indptr_host;
  view.kv_lens = lens;
  view.hints.shared_prefix = shared;

  const HostGroups host(view, {kMaxQLen, kMinSaved});
  const Guarded<int32_t> shared_device(shared);
  // Plans without requests of their own, with other numbers of threads.
  const auto finds = [&](auto launch) {
    PrefixGroupsParams prefixes{.q_indptr = params.q_indptr,
                                .kv_lens = params.kv_lens,
                                .shared_prefix = shared_device.data(),
                                .requests = params.requests,
                                .max_q_len = kMaxQLen,
                                .tile_tokens = 32,
                                .min_prefix = kMinPrefix,
                                .min_saved = kMinSaved,
                                .more_saved = extra_saved(kMinSaved),
                                .levels = kPrefixLevels};
    std::vector<Guarded<int32_t>> device;
    device.reserve(4 * kPrefixLevels + 2);
    const auto take = [&](size_t count) { return device.emplace_back(count).data(); };
    for (PrefixGroups& groups : prefixes.groups) {
      groups = {take(requests + 1), take(requests), take(requests), take(requests)};
    }
    prefixes.first_keys = take(requests);
    prefixes.scratch = take(kMaxPlanBlocks * requests * kPrefixScratch);
    launch(PlanTasks{.prefixes = prefixes});
    for (size_t level = 0; level < kPrefixLevels; ++level) {
      SCOPED_TRACE(level);
      const auto found = std::span(device).subspan(4 * level, 4);
      if (level >= host.used) {
        EXPECT_EQ(found[1].read(), std::vector<int32_t>(requests, 0)) << "groups";
        continue;
      }
      for (size_t i = 0; i < 3; ++i) EXPECT_EQ(found[i].read(), host.arrays[3 * level + i]) << i;
      EXPECT_EQ(found[3].read(), host.begins(level));
    }
    EXPECT_EQ(device[4 * kPrefixLevels].read(), host.arrays.back());
    device[4 * kPrefixLevels + 1].read();  // guards
  };
  BatchParams nobody{};
  nobody.q_heads = nobody.kv_heads = 1;
  finds([&](const PlanTasks& tasks) {
    load("portable/plan", {"16"})
        .launch({}, PlanKernelParams<PlanParams>{{.batch = nobody}, tasks, 0}, nullptr);
  });
  finds([&](PlanTasks tasks) {
    tasks.level_bytes = 64;  // a block per level, each writes its own
    load("portable/plan", {"128"})
        .launch({kPrefixLevels}, PlanKernelParams<PlanParams>{{.batch = nobody}, tasks, 0},
                nullptr);
  });
  const Guarded<PrefillOrder> order(size_t{1});
  finds([&](PlanTasks tasks) {
    tasks.level_bytes = 64;
    load("sm90/joint_plan", {"16", "4"})
        .launch(
            {1 + kPrefixLevels},
            JointPlanParams{.order = {.batch = nobody, .order = order.data(), .tokens_per_tile = 1},
                            .groups = {.batch = nobody},
                            .tasks = tasks,
                            .order_blocks = 1,
                            .group_rows = 128},
            nullptr);
  });
}

INSTANTIATE_TEST_SUITE_P(All, Planners, ::testing::ValuesIn(batches()),
                         [](const auto& param) { return param.param.name; });

}  // namespace
}  // namespace fovea::kernels::cuda
