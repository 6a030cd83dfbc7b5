// SPDX-License-Identifier: Apache-2.0
#include "engine/memory_budget.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "engine/available_memory.h"
#include "engine/cache_set.h"
#include "fovea/error.h"
#include "support/expect_error.h"
#include "support/fake_root.h"

namespace fovea {
namespace {

KvCacheSpec kv_spec(int32_t page_size, int32_t window) {
  KvCacheSpec spec;
  spec.layers = 2;
  spec.kv_heads = 2;
  spec.head_dim = spec.head_dim_v = 64;
  spec.page_size = page_size;
  spec.window = window;
  return spec;
}

StateCacheSpec state_spec() {
  StateCacheSpec spec;
  spec.layers = 3;
  spec.conv_dim = 96;
  spec.conv_width = 4;
  spec.heads = 4;
  spec.rows = spec.columns = 32;
  return spec;
}

MemoryDemand demand_for(int32_t page_size, bool full, bool window, bool state) {
  MemoryDemand demand;
  demand.page_size = page_size;
  demand.max_requests = 8;
  demand.max_batch_tokens = 256;
  demand.max_context = 4096;
  if (full) demand.groups.push_back({kv_spec(page_size, 0), {}});
  if (window) demand.groups.push_back({kv_spec(page_size, 100), {}});
  if (state) demand.groups.push_back({{}, state_spec()});
  return demand;
}

// Returns the bytes that the pools really take.
size_t built_bytes(const MemoryDemand& demand, const MemoryPlan& plan) {
  size_t bytes = 0;
  for (size_t g = 0; g < demand.groups.size(); ++g) {
    const CacheGroup& group = demand.groups[g];
    if (group.state) {
      bytes += static_cast<size_t>(plan.state_slots) * group.state->bytes_per_slot();
    } else {
      const bool window = plan.window_pages[g] > 0;
      bytes += kv_pool_bytes(*group.kv, window ? plan.window_pages[g] : plan.pages,
                             window ? plan.pages * demand.page_size : 0);
    }
  }
  return bytes;
}

TEST(MemoryBudget, NeverExceedsTheBudgetAndServesOneFullRequest) {
  int accepted = 0, refused = 0;
  EXPECT_TRUE(rc::check([&] {
    const auto shape = *rc::gen::inRange(1, 8);
    MemoryDemand demand =
        demand_for(*rc::gen::element(1, 3, 16, 64), shape & 1, shape & 2, shape & 4);
    demand.max_requests = *rc::gen::inRange(1, 100);
    demand.max_batch_tokens = *rc::gen::inRange(1, 2000);
    demand.max_context = *rc::gen::inRange(1, 20000);
    demand.prefix_cache = *rc::gen::arbitrary<bool>();
    demand.max_drafts = *rc::gen::inRange(0, 8);
    const bool keeps_drafts = demand.max_drafts > 0 && *rc::gen::arbitrary<bool>();
    for (CacheGroup& group : demand.groups) {
      if (!group.state || !keeps_drafts) continue;
      group.state->max_drafts = demand.max_drafts;
      group.state->draft_inputs = 12;
    }
    demand.shrink_context = *rc::gen::arbitrary<bool>();
    demand.budget = (size_t{1} << *rc::gen::inRange(12, 29)) + *rc::gen::inRange<size_t>(0, 4096);
    MemoryPlan plan;
    try {
      plan = plan_memory(demand);
    } catch (const Error& error) {
      RC_ASSERT(error.code() == ErrorCode::out_of_memory);
      RC_ASSERT(std::string(error.what()).find(std::to_string(demand.budget)) != std::string::npos);
      ++refused;
      return;
    }
    ++accepted;
    RC_ASSERT(plan.bytes <= demand.budget);
    RC_ASSERT(built_bytes(demand, plan) <= plan.bytes);
    RC_ASSERT(plan.max_context >= 1 && plan.max_context <= demand.max_context);
    if (!demand.shrink_context) RC_ASSERT(plan.max_context == demand.max_context);
    const int64_t context_pages = (plan.max_context + demand.page_size - 1) / demand.page_size;
    RC_ASSERT(plan.pages - 1 >= context_pages);
    for (size_t g = 0; g < demand.groups.size(); ++g) {
      if (demand.groups[g].state) {
        const bool keeps = demand.groups[g].state->max_drafts > 0;
        RC_ASSERT(plan.state_slots >= 2 + (keeps ? 0 : demand.max_drafts));
      } else if (const int32_t window = demand.groups[g].kv->window; window > 0) {
        const int64_t one_request =
            (window - 1 + demand.max_batch_tokens + demand.page_size - 1) / demand.page_size + 1;
        RC_ASSERT(plan.window_pages[g] - 1 >= std::min(one_request, context_pages));
      }
    }
  }));
  EXPECT_GT(accepted, 20);
  EXPECT_GT(refused, 0);
}

TEST(MemoryBudget, StatesThatKeepDraftsNeedNoOthers) {
  MemoryDemand demand = demand_for(16, true, false, true);
  demand.budget = size_t{1} << 30;
  const int32_t without = plan_memory(demand).state_slots;
  demand.max_drafts = 4;
  EXPECT_EQ(plan_memory(demand).state_slots, without + 4 * demand.max_requests);
  demand.groups.back().state->max_drafts = 4;
  demand.groups.back().state->draft_inputs = 12;
  EXPECT_EQ(plan_memory(demand).state_slots, without);
}

TEST(MemoryBudget, MoreMemoryNeverShortensTheContext) {
  MemoryDemand demand = demand_for(16, true, true, true);
  demand.shrink_context = true;
  int32_t context = 0;
  for (size_t budget = 600'000; budget < 64'000'000; budget += 300'000) {
    demand.budget = budget;
    const int32_t next = plan_memory(demand).max_context;
    EXPECT_GE(next, context) << budget;
    context = next;
  }
  EXPECT_EQ(context, demand.max_context);
}

// A context's bytes suffice for it, and one byte less does not.
TEST(MemoryBudget, TheContextIsTheLongestThatFits) {
  for (const int32_t page_size : {1, 3, 16}) {
    MemoryDemand demand = demand_for(page_size, true, true, true);
    demand.groups.push_back({kv_spec(page_size, 1), {}});
    for (const size_t budget : {700'000u, 1'234'567u, 5'000'001u}) {
      SCOPED_TRACE(budget);
      demand.max_context = 4096;
      demand.shrink_context = true;
      demand.budget = budget;
      const int32_t context = plan_memory(demand).max_context;
      ASSERT_LT(context, 4096);
      demand.shrink_context = false;
      demand.max_context = context + 1;
      test::expect_error(ErrorCode::out_of_memory,
                         "enough for " + std::to_string(context) + " tokens",
                         [&] { plan_memory(demand); });
      demand.max_context = context;
      demand.budget = plan_memory(demand).bytes;
      EXPECT_EQ(plan_memory(demand).bytes, demand.budget);
    }
  }
  MemoryDemand demand = demand_for(16, true, false, false);
  demand.max_context = std::numeric_limits<int32_t>::max();
  test::expect_invalid("must stay below 2^31 slots", [&] { plan_memory(demand); });
}

// For any chunks of a pass, no request within the limit for windows has to wait.
TEST(MemoryBudget, WindowsServeAllRequestsAtOnce) {
  for (const int32_t window : {1, 2, 5, 16}) {
    for (const int32_t page_size : {1, 3, 4}) {
      SCOPED_TRACE(testing::Message() << "window " << window << ", pages of " << page_size);
      CacheSetOptions options;
      options.page_size = page_size;
      options.max_requests = 4;
      MemoryDemand demand;
      demand.page_size = page_size;
      demand.max_requests = options.max_requests;
      demand.max_batch_tokens = 8;
      demand.max_context = 60;
      demand.budget = size_t{1} << 24;
      demand.groups = {{kv_spec(page_size, 0), {}}, {kv_spec(page_size, window), {}}};
      options.groups = demand.groups;
      options.plan = plan_memory(demand);
      CacheSet caches(options);
      std::mt19937 random(7);
      struct Running {
        CacheLease lease;
        int32_t computed = 0;
      };
      std::vector<Running> requests(4);
      const std::vector<int32_t> one(1);
      for (Running& request : requests) request.lease = caches.admit({one, ""}, false, 0).value();
      while (requests.front().computed < demand.max_context - 8) {
        int32_t left = demand.max_batch_tokens - 4;  // in addition to one token of each
        for (Running& request : requests) {
          const auto more = static_cast<int32_t>(random() % static_cast<uint32_t>(left + 1));
          const int32_t end = std::min(request.computed + 1 + more, demand.max_context);
          left -= more;
          ASSERT_TRUE(caches.extend(request.lease, request.computed, end));
          request.computed = std::min(end, demand.max_context - 1);
        }
      }
      for (Running& request : requests) caches.release(request.lease);
    }
  }
}

TEST(MemoryBudget, TakesNoMoreThanCouldBeUsed) {
  MemoryDemand demand = demand_for(16, true, true, false);
  demand.budget = size_t{1} << 40;
  const MemoryPlan plan = plan_memory(demand);
  EXPECT_EQ(plan.pages, 1 + 8 * 4096 / 16);
  EXPECT_LT(plan.bytes, size_t{200} << 20);
}

TEST(MemoryBudget, ImpossibleBudgetsNameNeedAndHave) {
  MemoryDemand demand = demand_for(16, true, false, false);
  demand.budget = 5 << 20;
  test::expect_error(ErrorCode::out_of_memory,
                     {"max_context is 4096", std::to_string(demand.budget),
                      std::to_string(kv_pool_bytes(*demand.groups[0].kv, 257))},
                     [&] { plan_memory(demand); });
  demand.shrink_context = true;
  demand.budget = 100;
  EXPECT_THROW(plan_memory(demand), Error);
}

class AvailableMemory : public ::testing::Test {
 protected:
  void write(const std::string& path, const std::string& text) { root_.write(path, text); }
  size_t available() const { return available_memory(root_.path()); }

  test::FakeRoot root_;
};

TEST_F(AvailableMemory, ReadsMeminfoWithoutCgroups) {
  EXPECT_THROW((void)available(), Error);
  write("proc/meminfo", "MemTotal:  100 kB\nMemFree: 7 kB\nMemAvailable:      64 kB\n");
  EXPECT_EQ(available(), 64u * 1024);
}

TEST_F(AvailableMemory, TakesTheTightestCgroup) {
  write("proc/meminfo", "MemAvailable: 1000000 kB\n");
  write("proc/self/cgroup", "0::/a/b\n");
  write("sys/fs/cgroup/a/b/memory.max", "max\n");
  write("sys/fs/cgroup/a/b/memory.current", "5000\n");
  EXPECT_EQ(available(), 1024000000u);
  write("sys/fs/cgroup/a/memory.max", "90000\n");
  write("sys/fs/cgroup/a/memory.current", "50000\n");
  write("sys/fs/cgroup/a/memory.stat", "anon 10\ninactive_file 20000\n");
  EXPECT_EQ(available(), 60000u);
  write("sys/fs/cgroup/memory.max", "10\n");
  write("sys/fs/cgroup/memory.current", "50\n");
  EXPECT_EQ(available(), 0u);
}

TEST_F(AvailableMemory, ReadsVersionOne) {
  write("proc/meminfo", "MemAvailable: 1000000 kB\n");
  write("proc/self/cgroup", "5:cpu,memory:/x\n4:devices:/y\n");
  write("sys/fs/cgroup/memory/x/memory.limit_in_bytes", "1000\n");
  write("sys/fs/cgroup/memory/x/memory.usage_in_bytes", "300\n");
  EXPECT_EQ(available(), 700u);
}

TEST_F(AvailableMemory, ThisMachineHasSome) { EXPECT_GT(available_memory(), size_t{1} << 20); }

}  // namespace
}  // namespace fovea
