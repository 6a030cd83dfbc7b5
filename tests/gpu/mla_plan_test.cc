// SPDX-License-Identifier: Apache-2.0
// The work lists of portable/mla_plan: they contain every key of every row tile once, the joining
// kernel finds all parts, and no worker has much more than its share.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "core/rounding.h"
#include "gpu/planner_batches.h"
#include "kernels/cuda/common/mla_params.h"
#include "kernels/cuda/common/plan_kernel_params.h"

namespace fovea::kernels::cuda {
namespace {

constexpr int32_t kKeys = 64;  // per block

struct Part {
  MlaItem item;
  int32_t worker;
};
using Tiles = std::map<std::pair<int32_t, int32_t>, std::vector<Part>>;  // request, first row

struct PlanCase {
  int32_t row_tile, heads, workers;
  MlaJoins joins = MlaJoins::merge;
  int32_t cluster = 1;
  bool whole_tiles = false;
};

std::string name_of(const PlanCase& test) {
  return "row_tile " + std::to_string(test.row_tile) + ", workers " + std::to_string(test.workers) +
         ", joins " + std::to_string(static_cast<int>(test.joins));
}

class MlaPlanners : public Planners {
 protected:
  // Returns the end of the keys that the row tile from `row` on sees.
  int32_t key_end(size_t request, int32_t row, const PlanCase& test) const {
    const auto [q_len, kv_len] = batch().requests[request];
    const int32_t last = std::min(row + test.row_tile, q_len * test.heads) - 1;
    return std::max(std::min(kv_len, kv_len - q_len + last / test.heads + 1), 0);
  }
  void expect_plan(const PlanCase& test);
  Tiles listed(const PlanCase& test, const std::vector<MlaItem>& items,
               const std::vector<MlaRange>& ranges, int64_t most);
  void expect_tile(const PlanCase& test, const std::vector<Part>& parts,
                   std::vector<MlaMerge>& merges);
};

// Reads the lists. Every range names its first item, and only its ends may be parts. No worker has
// more than `most`.
Tiles MlaPlanners::listed(const PlanCase& test, const std::vector<MlaItem>& items,
                          const std::vector<MlaRange>& ranges, int64_t most) {
  Tiles tiles;
  const bool of_blocks = test.joins == MlaJoins::pairs;
  for (size_t r = 0; r < ranges.size(); ++r) {
    const MlaRange& range = ranges[r];
    // Two blocks with the same items: the one with the first rows represents both.
    if (range.begin >= range.end || (of_blocks && range.rank != 0)) continue;
    EXPECT_EQ(std::memcmp(&range.first, &items[static_cast<size_t>(range.begin)], sizeof(MlaItem)),
              0);
    const auto number = static_cast<int32_t>(r);
    // Pairs of workers are interleaved, so that blocks of the same rows are adjacent.
    const bool paired =
        of_blocks && (ranges[r ^ 1].rank == 0 || ranges[r ^ 1].begin == ranges[r ^ 1].end);
    const int32_t worker = !of_blocks ? number : paired ? number / 4 * 2 + number % 2 : number / 2;
    int64_t load = 0;
    for (int32_t i = range.begin; i < range.end; i += range.step) {
      const MlaItem& item = items[static_cast<size_t>(i)];
      load += ceil_div(item.key_end - item.key_begin, kKeys) + 2;
      const bool is_end = i == range.begin || i + range.step >= range.end;
      EXPECT_TRUE(item.partial == -1 || is_end);
      tiles[{item.request, item.first_row}].push_back({item, worker});
    }
    EXPECT_LE(load, most) << "worker " << worker;
  }
  return tiles;
}

// Checks that the parts are in ascending order of keys and of workers, and removes the tile's from
// `merges`.
void MlaPlanners::expect_tile(const PlanCase& test, const std::vector<Part>& parts,
                              std::vector<MlaMerge>& merges) {
  const auto count = static_cast<int32_t>(parts.size());
  const int32_t first = parts[0].worker;
  const bool in_decode = test.joins == MlaJoins::clusters || test.joins == MlaJoins::blocks;
  const bool paired = test.joins == MlaJoins::pairs && parts[0].item.partial == kPaired;
  for (int32_t n = 0; n < count; ++n) {
    const Part& part = parts[static_cast<size_t>(n)];
    EXPECT_EQ(part.worker, first + n);
    EXPECT_EQ(part.item.partial, count == 1  ? -1
                                 : in_decode ? parts_of_workers(first, count)
                                 : paired    ? kPaired
                                             : slot_of_worker(part.worker, first));
  }
  if (paired) {
    EXPECT_EQ(count, kPairWorkers);
    EXPECT_EQ(first % kPairWorkers, 0);
  }
  if (count == 1 || in_decode || paired) return;
  MlaMerge& merge = merges[static_cast<size_t>(first)];
  const MlaItem& item = parts[0].item;
  EXPECT_EQ(merge.q_begin, item.q_begin);
  EXPECT_EQ(merge.q_len, item.q_len);
  EXPECT_EQ(merge.first_row, item.first_row);
  EXPECT_EQ(merge.first, slot_of_worker(first, first));
  EXPECT_EQ(merge.count, count);
  merge.count = 0;
}

void MlaPlanners::expect_plan(const PlanCase& test) {
  size_t tiles = 0;
  int64_t cost = 0;
  for (size_t i = 0; i < batch().requests.size(); ++i) {
    const int32_t rows = batch().requests[i].first * test.heads;
    for (int32_t row = 0; row < rows; row += test.row_tile, ++tiles) {
      cost += std::max(ceil_div(key_end(i, row, test), kKeys), 1) + 2;
    }
  }
  const auto workers = static_cast<size_t>(test.workers);
  if (test.cluster > 1 && tiles > workers / static_cast<size_t>(test.cluster)) return;
  const Guarded<MlaItem> items(tiles + workers);
  const Guarded<MlaRange> ranges(test.joins == MlaJoins::pairs ? 2 * workers : workers);
  const Guarded<MlaMerge> merges(workers);
  const Guarded<uint32_t> arrivals(workers * (test.cluster > 1 ? 16 : 1));
  MlaPlanParams plan{};
  plan.batch = params;
  plan.batch.q_heads = test.heads;
  plan.batch.kv_heads = 1;
  plan.batch.mask.window = 0;
  plan.batch.min_planned_q_len = plan.batch.max_planned_q_len = 0;
  plan.work.items = items.data();
  plan.work.ranges = ranges.data();
  plan.work.merges = merges.data();
  plan.work.arrivals = arrivals.data();
  plan.work.workers = test.workers;
  plan.work.cluster = test.cluster;
  plan.whole_tiles = test.whole_tiles;
  plan.joins = test.joins;
  load("portable/mla_plan", {std::to_string(test.row_tile)})
      .launch({1}, PlanKernelParams<MlaPlanParams>{plan, {}, 0}, nullptr);

  const int64_t share = ceil_div(cost, int64_t{test.workers});
  const bool any_balance = test.whole_tiles || test.cluster > 1;
  // A range that begins inside an item also takes the following items.
  const int64_t most = any_balance ? cost : share + std::max<int64_t>(4, share / 4) + 2;
  Tiles found = listed(test, items.read(), ranges.read(), most);
  std::vector<MlaMerge> left = merges.read();
  EXPECT_EQ(found.size(), tiles);
  for (auto& [tile, parts] : found) {
    SCOPED_TRACE("request " + std::to_string(tile.first) + ", row " + std::to_string(tile.second));
    std::ranges::sort(parts, {}, [](const Part& part) { return part.item.key_begin; });
    const auto [q_len, kv_len] = batch().requests[static_cast<size_t>(tile.first)];
    int32_t key = 0;
    for (const Part& part : parts) {
      EXPECT_EQ(part.item.key_begin, key);
      EXPECT_TRUE(part.item.key_end % kKeys == 0 || &part == &parts.back());
      key = part.item.key_end;
      EXPECT_EQ(part.item.q_begin, q_indptr_host[static_cast<size_t>(tile.first)]);
      EXPECT_EQ(part.item.q_len, q_len);
      EXPECT_EQ(part.item.kv_len, kv_len);
    }
    EXPECT_EQ(key, key_end(static_cast<size_t>(tile.first), tile.second, test));
    EXPECT_TRUE(!test.whole_tiles || parts.size() == 1);
    expect_tile(test, parts, left);
  }
  EXPECT_TRUE(std::ranges::all_of(left, [](const MlaMerge& merge) { return merge.count == 0; }))
      << "merges of no tile";
  EXPECT_TRUE(std::ranges::all_of(arrivals.read(), [](uint32_t count) { return count == 0; }));
}

TEST_P(MlaPlanners, CoverEveryKeyOnceAndSayWhereItsPartIs) {
  for (const PlanCase& test :
       {PlanCase{128, 128, 66}, PlanCase{128, 128, 66, MlaJoins::pairs}, PlanCase{64, 64, 132},
        PlanCase{64, 40, 7}, PlanCase{64, 64, 132, MlaJoins::merge, 1, true},
        PlanCase{16, 16, 132, MlaJoins::blocks}, PlanCase{16, 5, 7, MlaJoins::blocks},
        PlanCase{16, 16, 120, MlaJoins::clusters, 8}}) {
    SCOPED_TRACE(name_of(test));
    expect_plan(test);
  }
}

INSTANTIATE_TEST_SUITE_P(All, MlaPlanners, ::testing::ValuesIn(batches()),
                         [](const auto& param) { return param.param.name; });

}  // namespace
}  // namespace fovea::kernels::cuda
