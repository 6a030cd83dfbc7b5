// SPDX-License-Identifier: Apache-2.0
#include "engine/memory_budget.h"

#include <algorithm>
#include <limits>

#include "core/check.h"
#include "core/rounding.h"

namespace fovea {
namespace {

// Useful number of pages for each page that running requests could fill. Additional pages would
// help only a prefix cache over more conversations than this.
constexpr int64_t kCachedConversations = 4;
constexpr int32_t kSnapshotsPerRequest = 3;
constexpr size_t kAlignmentSlack = 3 * 64;  // alignment of the arrays of a state layer

// Returns the largest value of [low, high] that satisfies a condition. The condition holds for low,
// and once false, stays false.
template <typename Condition>
int64_t largest(int64_t low, int64_t high, const Condition& condition) {
  while (low < high) {
    const int64_t middle = low + (high - low + 1) / 2;
    if (condition(middle)) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// The number of requests that window pools and states are sized for.
struct Width {
  int32_t running = 1;
  int32_t cached = 0;  // finished requests whose last window or state is kept
};

int64_t window_pages(const MemoryDemand& demand, const KvCacheSpec& spec, int64_t pages,
                     Width width) {
  const int64_t before = ceil_div<int64_t>(spec.window - 1, demand.page_size);
  const int64_t requests = int64_t{width.running} + width.cached;
  // A request's window may begin and end inside a page, and so may its new tokens.
  const int64_t wanted =
      1 + requests * (before + 2) + ceil_div<int64_t>(demand.max_batch_tokens, demand.page_size);
  return std::min(pages, wanted);
}

MemoryPlan sized(const MemoryDemand& demand, int64_t pages, Width width) {
  MemoryPlan plan;
  plan.pages = pages;
  plan.max_context = demand.max_context;
  plan.window_pages.resize(demand.groups.size());
  for (size_t g = 0; g < demand.groups.size(); ++g) {
    const CacheGroup& group = demand.groups[g];
    if (group.state) {
      plan.state_slots = state_slots(*group.state, width.running, demand.max_drafts, width.cached);
      plan.bytes += static_cast<size_t>(plan.state_slots) * group.state->bytes_per_slot() +
                    static_cast<size_t>(group.state->layers) * kAlignmentSlack;
    } else if (group.kv->window > 0) {
      plan.window_pages[g] = window_pages(demand, *group.kv, pages, width);
      plan.bytes += kv_pool_bytes(*group.kv, plan.window_pages[g], pages * demand.page_size);
    } else {
      plan.bytes += kv_pool_bytes(*group.kv, pages);
    }
  }
  return plan;
}

int64_t pages_of_context(const MemoryDemand& demand, int64_t context) {
  return 1 + ceil_div<int64_t>(context, demand.page_size);
}

// Returns the smallest plan that serves one request of `context` tokens.
MemoryPlan smallest(const MemoryDemand& demand, int64_t context) {
  return sized(demand, pages_of_context(demand, context), {});
}

int32_t affordable_context(const MemoryDemand& demand) {
  const size_t need = smallest(demand, demand.max_context).bytes;
  if (need <= demand.budget) return demand.max_context;
  const size_t page_bytes = smallest(demand, 1).bytes;
  if (page_bytes > demand.budget) {
    fail(ErrorCode::out_of_memory,
         "the KV budget is {} bytes; one page of {} tokens of this model needs {} bytes",
         demand.budget, demand.page_size, page_bytes);
  }
  const auto fitting = static_cast<int32_t>(largest(1, demand.max_context, [&](int64_t context) {
    return smallest(demand, context).bytes <= demand.budget;
  }));
  if (!demand.shrink_context) {
    fail(ErrorCode::out_of_memory,
         "max_context is {}, which needs {} bytes of KV memory; the budget is {} bytes, enough for "
         "{} tokens",
         demand.max_context, need, demand.budget, fitting);
  }
  return fitting;
}

}  // namespace

int32_t state_slots(const StateCacheSpec& state, int32_t running, int32_t max_drafts,
                    int32_t cached) {
  const int32_t draft_states = state.max_drafts > 0 ? 0 : max_drafts;
  return 1 + running * (1 + draft_states) + kSnapshotsPerRequest * cached;
}

MemoryPlan plan_memory(const MemoryDemand& wish) {
  MemoryDemand demand = wish;
  const int64_t max_pages = std::numeric_limits<int32_t>::max() / demand.page_size;
  check_argument(pages_of_context(demand, demand.max_context) <= max_pages,
                 "max_context is {}, must stay below 2^31 slots with a page_size of {}",
                 demand.max_context, demand.page_size);
  demand.max_context = affordable_context(demand);

  const int64_t min_pages = pages_of_context(demand, demand.max_context);
  const auto width_for = [&](int64_t requests) {
    const auto running = static_cast<int32_t>(requests);
    return Width{running, demand.prefix_cache ? running : 0};
  };
  const auto fits = [&](int64_t pages, Width width, size_t budget) {
    return sized(demand, pages, width).bytes <= budget;
  };
  // One half of the remaining memory goes to width, the other half to length.
  const size_t min_bytes = sized(demand, min_pages, {}).bytes;
  const size_t half = min_bytes + (demand.budget - min_bytes) / 2;
  Width width;
  if (fits(min_pages, width_for(1), half)) {
    width = width_for(largest(1, demand.max_requests, [&](int64_t requests) {
      return fits(min_pages, width_for(requests), half);
    }));
  }
  const int64_t useful =
      (demand.prefix_cache ? kCachedConversations : 1) * demand.max_requests * (min_pages - 1);
  const int64_t high = std::max(min_pages, std::min(max_pages, 1 + useful));
  const int64_t pages =
      largest(min_pages, high, [&](int64_t count) { return fits(count, width, demand.budget); });
  return sized(demand, pages, width);
}

}  // namespace fovea
