// SPDX-License-Identifier: Apache-2.0
// Plans of a pass in one launch equal the plans that each planner writes by itself.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "attention/prefix_levels.h"
#include "gpu/gpu.h"
#include "gpu/planner_batches.h"
#include "kernels/cuda/common/joint_plan_params.h"

namespace fovea::kernels::cuda {
namespace {

constexpr int32_t kCtas = 132, kMaxFewTokens = 2;
constexpr uint32_t kPlanCtas = 4;

template <typename T>
bool same_bytes(const Guarded<T>& a, const Guarded<T>& b) {
  const std::vector<T> left = a.read(), right = b.read();
  return std::memcmp(left.data(), right.data(), left.size() * sizeof(T)) == 0;
}

// The output of the plan of decode.
struct DecodeList {
  DecodeList(const Batch& batch, int32_t row_tile) {
    size_t tiles = 0;
    for (const auto& [q_len, kv_len] : batch.requests) {
      tiles += static_cast<size_t>((q_len * batch.group() + row_tile - 1) / row_tile);
    }
    items.emplace(tiles * static_cast<size_t>(batch.kv_heads) + kCtas);
  }
  DecodePlanParams params(const BatchParams& batch) const {
    DecodePlanParams plan{};
    plan.batch = batch;
    plan.list.items = items->data();
    plan.list.ranges = ranges.data();
    plan.list.tickets = tickets.data();
    plan.list.ctas = kCtas;
    plan.list.max_heads = 2;
    plan.list.min_units = 1;
    plan.min_ctas = kCtas / 2;
    plan.pairs_per_unit = 100;
    return plan;
  }
  std::optional<Guarded<DecodeItem>> items;
  Guarded<DecodeRange> ranges{size_t{kCtas}};
  Guarded<int32_t> tickets{size_t{2 * kCtas}};
};

// The output of the plan of prefill.
struct OrderList {
  explicit OrderList(size_t tokens) : tiles(tokens) {}
  PrefillOrderParams params(const BatchParams& batch) const {
    PrefillOrderParams plan{};
    plan.batch = batch;
    plan.order = order.data();
    plan.tiles = tiles.data();
    plan.tokens_per_tile = 32;
    plan.heads_shift = 1;
    plan.token_bytes = 512;
    plan.blocks = kCtas;
    return plan;
  }
  Guarded<PrefillOrder> order{size_t{1}};
  Guarded<PrefillTile> tiles;
};

// The output of portable/plan for the groups of each level.
struct GroupLists {
  GroupLists(const Batch& batch, int32_t levels)
      : requests(batch.requests.size()),
        pairs(requests * static_cast<size_t>(batch.kv_heads)),
        bytes(static_cast<size_t>(levels) * level_bytes()) {}
  size_t level_bytes() const {
    const size_t all = pairs * sizeof(GroupParts) + (pairs + kCtas) * sizeof(WorkItem) +
                       kCtas * (2 * sizeof(int32_t) + sizeof(MergeItem)) +
                       (requests + 1) * sizeof(int32_t);
    return (all + 63) / 64 * 64;
  }
  // The list of level 0.
  WorkList list(GroupParts*& parts) const {
    char* at = bytes.data();
    const auto take = [&]<typename T>(T*& to, size_t count) {
      to = reinterpret_cast<T*>(at);
      at += count * sizeof(T);
    };
    WorkList work{};
    take(work.items, pairs + kCtas);
    take(work.cta_begin, kCtas);
    take(work.cta_end, kCtas);
    take(work.merges, kCtas);
    take(work.tile_indptr, requests + 1);
    take(parts, pairs);
    work.ctas = kCtas;
    return work;
  }
  size_t requests, pairs;
  Guarded<char> bytes;
};

// Arrays of the groups of a cascade.
struct Prefixes {
  Prefixes(const BatchParams& batch, const std::vector<int32_t>& shared, int32_t levels)
      : shared_prefix(shared) {
    const auto requests = static_cast<size_t>(batch.requests);
    arrays.reserve(4 * static_cast<size_t>(levels) + 2);
    const auto take = [&](size_t count) { return arrays.emplace_back(count).data(); };
    found.q_indptr = batch.q_indptr;
    found.kv_lens = batch.kv_lens;
    found.shared_prefix = shared_prefix.data();
    for (int32_t i = 0; i < levels; ++i) {
      found.groups[i] = {take(requests + 1), take(requests), take(requests), take(requests)};
    }
    found.first_keys = take(requests);
    found.scratch = take(kMaxPlanBlocks * requests * kPrefixScratch);
    found.requests = batch.requests;
    found.max_q_len = 2;
    found.tile_tokens = 32;
    found.min_prefix = kMinPrefix;
    found.min_saved = 1;
    found.levels = levels;
  }
  PlanParams plan(const BatchParams& batch, const GroupLists& lists) const {
    GroupParts* parts = nullptr;
    PlanParams plan{.batch = batch, .work = lists.list(parts), .whole_tiles = 0};
    plan.batch.q_indptr = found.groups[0].q_indptr;
    plan.batch.kv_lens = found.groups[0].kv_lens;
    plan.batch.min_kv_len = 1;
    plan.batch.mask = {};
    plan.batch.mask.first_keys = found.groups[0].first_keys;
    return plan;
  }
  Guarded<int32_t> shared_prefix;
  std::vector<Guarded<int32_t>> arrays;
  PrefixGroupsParams found{};
};

// For kernels that run alone.
constexpr float kNoPairs = 1e30f;

TEST_P(Planners, MixedBatchesAreThoseOfTwoLaunches) {
  if (batch().max_planned_q_len > 0) GTEST_SKIP() << "the batch of one of its plans";
  BatchParams few = params, many = params;
  few.max_planned_q_len = kMaxFewTokens;
  many.min_planned_q_len = kMaxFewTokens + 1;
  many.max_planned_q_len = 1 << 30;
  const auto tokens = static_cast<size_t>(q_indptr_host.back());
  const OrderList order_alone(tokens);
  load("sm90/prefill_order", {"256", "whole"})
      .launch({}, PlanKernelParams<PrefillOrderParams>{order_alone.params(many), {}, 0}, nullptr);
  for (const int32_t rows : {8, 16}) {
    SCOPED_TRACE(rows);
    const DecodeList alone(batch(), rows), joint(batch(), rows);
    const OrderList order_joint(tokens);
    load("sm90/decode_plan", {std::to_string(rows), "16", "4"})
        .launch({kPlanCtas}, PlanKernelParams<DecodePlanParams>{alone.params(few), {}, 0}, nullptr);
    JointPlanParams pass{};
    pass.decode = joint.params(few);
    pass.decode.pairs_per_unit = kNoPairs;
    pass.order = order_joint.params(many);
    pass.decode_blocks = kPlanCtas;
    pass.order_blocks = 1;
    pass.decode_rows = rows;
    load("sm90/joint_plan", {"16", "4"}).launch({kPlanCtas + 1}, pass, nullptr);
    EXPECT_TRUE(same_bytes(*alone.items, *joint.items));
    EXPECT_TRUE(same_bytes(alone.ranges, joint.ranges));
    EXPECT_TRUE(same_bytes(alone.tickets, joint.tickets));
    const PrefillOrder one = order_alone.order.read()[0], other = order_joint.order.read()[0];
    EXPECT_EQ(one.tile_count, other.tile_count);
    EXPECT_EQ(one.section_heads, other.section_heads);
    // The order of tiles of equal length may vary.
    const auto sorted = [](const OrderList& list) {
      std::vector<std::pair<int32_t, int32_t>> tiles;
      for (const PrefillTile& tile : list.tiles.read()) {
        tiles.emplace_back(tile.request, tile.first_token);
      }
      std::ranges::sort(tiles);
      return tiles;
    };
    EXPECT_EQ(sorted(order_alone), sorted(order_joint));
  }
}

TEST_P(Planners, CascadesAreThoseOfTwoLaunches) {
  if (batch().max_planned_q_len > 0 || batch().window > 0)
    GTEST_SKIP() << "not where prefixes are shared";
  constexpr int32_t kLevels = 2;
  std::mt19937 random(9);
  std::vector<int32_t> shared(batch().requests.size());
  for (int32_t& tokens : shared) {
    tokens = random() % 4 == 0 ? 0 : static_cast<int32_t>(random() % 3000);
  }
  for (const int32_t group_rows : {128, 64}) {
    SCOPED_TRACE(group_rows);
    const Prefixes prefixes(params, shared, kLevels), others(params, shared, kLevels);
    const GroupLists groups(batch(), kLevels), other_groups(batch(), kLevels);
    const DecodeList joint(batch(), 8), alone(batch(), 8);
    JointPlanParams pass{};
    pass.tasks.prefixes = prefixes.found;
    pass.tasks.level_bytes = static_cast<int64_t>(groups.level_bytes());
    pass.decode = joint.params(params);
    pass.decode.batch.mask.first_keys = prefixes.found.first_keys;
    pass.decode.pairs_per_unit = kNoPairs;
    pass.groups = prefixes.plan(params, groups);
    pass.decode_blocks = kPlanCtas;
    pass.decode_rows = 8;
    pass.group_rows = group_rows;
    load("sm90/joint_plan", {"16", "4"}).launch({kPlanCtas + kLevels}, pass, nullptr);

    const PlanTasks tasks{.prefixes = others.found, .level_bytes = pass.tasks.level_bytes};
    load("portable/plan", {std::to_string(group_rows)})
        .launch({kLevels},
                PlanKernelParams<PlanParams>{others.plan(params, other_groups), tasks, 0}, nullptr);
    EXPECT_TRUE(same_bytes(groups.bytes, other_groups.bytes));
    DecodePlanParams list = alone.params(pass.decode.batch);
    list.pairs_per_unit = kNoPairs;
    load("sm90/decode_plan", {"8", "16", "4"})
        .launch({kPlanCtas}, PlanKernelParams<DecodePlanParams>{list, {}, 0}, nullptr);
    EXPECT_TRUE(same_bytes(*joint.items, *alone.items));
    EXPECT_TRUE(same_bytes(joint.ranges, alone.ranges));
  }
}

// The kernel that merges must find the parts of a pair.
TEST_P(Planners, PartsOfGroupsAreFoundByTheirPair) {
  if (batch().max_planned_q_len > 0 || batch().window > 0)
    GTEST_SKIP() << "not where prefixes are shared";
  const std::vector<int32_t> shared(batch().requests.size(), 700);
  const Prefixes prefixes(params, shared, 1);
  const GroupLists groups(batch(), 1);
  const Guarded<GroupParts> parts(groups.pairs);
  JointPlanParams pass{};
  pass.tasks.prefixes = prefixes.found;
  pass.tasks.level_bytes = static_cast<int64_t>(groups.level_bytes());
  pass.groups = prefixes.plan(params, groups);
  pass.group_parts = parts.data();
  pass.group_rows = 128;
  load("sm90/joint_plan", {"16", "4"}).launch({1}, pass, nullptr);
  const auto read = [](const auto* from, size_t count) {
    std::vector<std::remove_cvref_t<decltype(*from)>> values(count);
    gpu::copy_to_host(values.data(), from, count * sizeof(*from), nullptr);
    gpu::synchronize(nullptr);
    return values;
  };
  const WorkList& work = pass.groups.work;
  const auto tiles = read(work.tile_indptr, groups.requests);
  const auto found = parts.read();
  for (const MergeItem& merge : read(work.merges, kCtas)) {
    if (merge.count == 0) continue;
    const int32_t tile = tiles[static_cast<size_t>(merge.request)] + merge.first_row / 128;
    const auto pair = static_cast<size_t>(tile * batch().kv_heads + merge.kv_head);
    EXPECT_EQ(found[pair].first, merge.first);
    EXPECT_EQ(found[pair].count, merge.count);
  }
}

// Groups keep the tensor cores of the other multiprocessors busy meanwhile.
TEST_P(Planners, DecodeLeavesMultiprocessorsToLongGroups) {
  if (batch().requests.size() != 64) GTEST_SKIP() << "a batch of some requests";
  const Guarded<int32_t> lens(std::vector<int32_t>(64, 20000));
  BatchParams long_batch = params;
  long_batch.kv_lens = lens.data();
  Prefixes prefixes(long_batch, std::vector<int32_t>(64, 19000), 1);
  prefixes.found.max_q_len = 8;
  const GroupLists groups(batch(), 1);
  const DecodeList list(batch(), 8);
  JointPlanParams pass{};
  pass.tasks.prefixes = prefixes.found;
  pass.tasks.level_bytes = static_cast<int64_t>(groups.level_bytes());
  pass.decode = list.params(long_batch);
  pass.decode.batch.mask.first_keys = prefixes.found.first_keys;
  pass.groups = prefixes.plan(long_batch, groups);
  pass.decode_blocks = kPlanCtas;
  pass.decode_rows = 8;
  pass.group_rows = 128;
  const Kernel plan = load("sm90/joint_plan", {"16", "4"});
  const auto busy_with = [&](float pairs_per_unit) {
    pass.decode.pairs_per_unit = pairs_per_unit;
    plan.launch({kPlanCtas + 1}, pass, nullptr);
    return std::ranges::count_if(list.ranges.read(),
                                 [](const DecodeRange& range) { return range.begin < range.end; });
  };
  const auto all = busy_with(1e30f);
  EXPECT_GE(all, kCtas * 3 / 4);
  EXPECT_LE(all, kCtas);
  const auto fewest = busy_with(1e-6f);
  EXPECT_GE(fewest, kCtas / 2 * 3 / 4);
  EXPECT_LE(fewest, kCtas / 2);
  // Groups with little work get none.
  for (float pairs_per_unit = 1e5f; pairs_per_unit > 10; pairs_per_unit *= 0.9f) {
    const auto busy = busy_with(pairs_per_unit);
    EXPECT_TRUE(busy == all || busy <= kCtas * 7 / 8) << busy << " with " << pairs_per_unit;
  }
}

INSTANTIATE_TEST_SUITE_P(All, Planners, ::testing::ValuesIn(batches()),
                         [](const auto& param) { return param.param.name; });

}  // namespace
}  // namespace fovea::kernels::cuda
