// SPDX-License-Identifier: Apache-2.0
// The work lists of the Hopper planners: all work once, in the promised order, evenly split, and
// within the promised bounds.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <map>
#include <set>
#include <tuple>
#include <vector>

#include "gpu/planner_batches.h"
#include "kernels/cuda/common/decode_params.h"
#include "kernels/cuda/common/joint_plan_params.h"
#include "kernels/cuda/common/plan_kernel_params.h"
#include "kernels/cuda/common/prefill_params.h"

namespace fovea::kernels::cuda {
namespace {

constexpr int32_t kGrain = 16, kOverhead = 4;  // as in the baked decode plans

struct DecodePart {
  DecodeItem item;
  int32_t range;
};

// The parts in the ranges of a decode plan.
struct DecodeParts {
  // By request, kv head and first row.
  std::map<std::tuple<int32_t, int32_t, int32_t>, std::vector<DecodePart>> tiles;
  std::set<int32_t> slots;     // slots of partial results
  std::vector<int64_t> loads;  // grains of keys of each range that is not empty
  int32_t heads = 1;           // per item
};

// Reads the lists. Every range names its first item, and every partial result has a slot of its
// own, within its range.
DecodeParts listed_parts(const std::vector<DecodeItem>& items,
                         const std::vector<DecodeRange>& ranges) {
  DecodeParts found;
  for (size_t c = 0; c < ranges.size(); ++c) {
    const DecodeRange& range = ranges[c];
    if (range.begin == range.end) continue;
    EXPECT_EQ(
        std::memcmp(&range.first, &items[static_cast<size_t>(range.begin)], sizeof(DecodeItem)), 0);
    int64_t load = 0;
    const auto number = static_cast<int32_t>(c);
    for (int32_t i = range.begin; i < range.end; ++i) {
      const DecodeItem& item = items[static_cast<size_t>(i)];
      found.heads = std::max(item.heads, 1);
      load += (item.key_end + kGrain - 1) / kGrain - item.key_begin / kGrain;
      found.tiles[{item.request, item.kv_head, item.first_row}].push_back({item, number});
      if (item.partial < 0) continue;
      EXPECT_TRUE(found.slots.insert(item.partial).second) << "slot " << item.partial << " twice";
      EXPECT_TRUE(item.partial == 2 * number || item.partial == 2 * number + 1);
    }
    found.loads.push_back(load);
  }
  return found;
}

// Returns ranges as an earlier pass left them, each with an item. A plan must empty the unused
// ones.
std::vector<DecodeRange> used_ranges(int32_t ctas) {
  DecodeRange used{};
  used.end = 1;
  return std::vector<DecodeRange>(static_cast<size_t>(ctas), used);
}

// Checks that the parts cover the keys of their tile once, in order, and name each other's slots.
void expect_whole_tile(const std::vector<DecodePart>& parts, int32_t begin, int32_t end) {
  int32_t key = begin;
  for (size_t part = 0; part < parts.size(); ++part) {
    const DecodeItem& item = parts[part].item;
    EXPECT_EQ(item.key_begin, key);
    key = item.key_end;
    EXPECT_EQ(item.parts, static_cast<int32_t>(parts.size()));
    EXPECT_EQ(item.partial < 0, parts.size() == 1);
    if (parts.size() == 1) continue;
    const int32_t slot =
        part == 0 ? item.first_part : item.first_part + 2 * static_cast<int32_t>(part) - 1;
    EXPECT_EQ(item.partial, slot) << "part " << part;
  }
  EXPECT_EQ(key, end);
}

TEST_P(Planners, DecodeCoversEveryKeyOnceInEqualRanges) {
  constexpr int32_t kRowTile = 8;
  const int32_t group = batch().group();
  int64_t all_tiles = 0;  // including other requests: the bound holds for any batch
  for (const auto& [q_len, kv_len] : batch().requests) {
    all_tiles += (q_len * group + kRowTile - 1) / kRowTile;
  }
  const Kernel plan = load("sm90/decode_plan", {"8", "16", "4"});
  for (const int32_t ctas : {1, 7, 132}) {
    SCOPED_TRACE(ctas);
    const Guarded<DecodeItem> items(static_cast<size_t>(all_tiles * batch().kv_heads + ctas));
    const Guarded<DecodeRange> ranges(used_ranges(ctas));
    const Guarded<int32_t> tickets(static_cast<size_t>(2 * ctas));
    DecodePlanParams list{};
    list.batch = params;
    list.list.items = items.data();
    list.list.ranges = ranges.data();
    list.list.tickets = tickets.data();
    list.list.ctas = ctas;
    list.list.max_heads = 2;
    list.list.min_units = 1;
    list.min_ctas = (ctas + 1) / 2;
    list.pairs_per_unit = 100;
    if (batch().max_planned_q_len > 0) {
      const JointPlanParams pass{.decode = list, .decode_blocks = 4, .decode_rows = kRowTile};
      load("sm90/joint_plan", {"16", "4"}).launch({4}, pass, nullptr);
    } else {
      plan.launch({4}, PlanKernelParams<DecodePlanParams>{list, {}, 0}, nullptr);
    }

    DecodeParts found = listed_parts(items.read(), ranges.read());
    int64_t line = 0, longest = 0;
    int64_t want = 0;
    for (size_t i = 0; i < batch().requests.size(); ++i) {
      const auto [q_len, kv_len] = batch().requests[i];
      if (!batch().planned(i)) continue;
      for (int32_t row = 0; row < q_len * group; row += kRowTile) {
        const int32_t last = std::min(row + kRowTile, q_len * group) - 1;
        const auto [begin, end] = batch().keys(i, row / group, last / group);
        const int64_t units = std::max((end + kGrain - 1) / kGrain - begin / kGrain, 1);
        line += units + kOverhead;
        longest = std::max(longest, units);
        for (int32_t head = 0; head < batch().kv_heads; head += found.heads, ++want) {
          const auto& parts = found.tiles[{static_cast<int32_t>(i), head, row}];
          ASSERT_FALSE(parts.empty()) << "request " << i << " head " << head << " row " << row;
          expect_whole_tile(parts, begin, end);
          for (const DecodePart& part : parts) {
            EXPECT_EQ(part.item.q_begin, q_indptr_host[i]);
            EXPECT_EQ(part.item.q_len, q_len);
            EXPECT_EQ(part.item.kv_len, kv_len);
          }
        }
      }
    }
    EXPECT_EQ(static_cast<int64_t>(found.tiles.size()), want) << "tiles without a request";
    EXPECT_TRUE(!batch().whole || ctas != 132 || found.slots.empty()) << "tiles are cut";
    if (want == 0) continue;
    line *= batch().kv_heads / found.heads;
    const auto live = static_cast<int64_t>(found.loads.size());
    // The cuts are equal, or every tile is whole. A CTA may fall into the overhead of an item, and
    // the plan may use fewer CTAs than there are, to keep tiles whole or to leave SMs to the
    // concurrent kernel.
    const int64_t whole = found.slots.empty() ? (want + live - 1) / live * longest : 0;
    EXPECT_LE(std::ranges::max(found.loads), std::max((line + live - 1) / live, whole));
    const int32_t expected = batch().max_planned_q_len > 0 ? list.min_ctas : ctas;
    EXPECT_GE(2 * (kOverhead + 1) * live, std::min<int64_t>(expected, line / 8));
    for (const int32_t part : found.slots) EXPECT_EQ(tickets.read()[static_cast<size_t>(part)], 0);
  }
}

// The parts of a tile belong to one cluster or to none. They are equal, and the first one is where
// the tile's CTAs begin.
TEST_P(Planners, DecodePutsThePartsOfSimilarTilesIntoClusters) {
  constexpr int32_t kPartUnits = 20, kMinUnits = 8;
  if (batch().max_planned_q_len > 0) return;
  const Kernel plan = load("sm90/decode_plan", {"8", "16", "4"});
  size_t all_tiles = 0;
  for (const auto& [q_len, kv_len] : batch().requests) {
    all_tiles += static_cast<size_t>((q_len * batch().group() + 7) / 8);
  }
  for (const int32_t cluster : {2, 3, 4, 6, 8}) {
    SCOPED_TRACE(cluster);
    const int32_t ctas = 120 / cluster * cluster;
    const Guarded<DecodeItem> items(all_tiles * static_cast<size_t>(batch().kv_heads) +
                                    static_cast<size_t>(ctas));
    const Guarded<DecodeRange> ranges(used_ranges(ctas));
    const Guarded<int32_t> tickets(static_cast<size_t>(2 * ctas));
    DecodePlanParams list{};
    list.batch = params;
    list.list = {.items = items.data(),
                 .ranges = ranges.data(),
                 .tickets = tickets.data(),
                 .ctas = ctas,
                 .max_heads = 2,
                 .min_units = kMinUnits,
                 .cluster = cluster,
                 .cluster_part_units = kPartUnits};
    plan.launch({4}, PlanKernelParams<DecodePlanParams>{list, {}, 0}, nullptr);

    int32_t busy = 0;
    bool in_clusters = false;
    const auto all_ranges = ranges.read();
    for (int32_t c = 0; c < ctas; ++c) {
      const DecodeRange& range = all_ranges[static_cast<size_t>(c)];
      if (range.begin == range.end) continue;
      ++busy;
      if (range.cluster_units == 0) continue;
      in_clusters = true;
      const DecodeItem& item = range.first;
      EXPECT_EQ(range.end, range.begin + 1) << "CTA " << c;
      EXPECT_EQ(item.heads, 1) << "CTA " << c;
      const int32_t first = item.first_part / 2;
      EXPECT_EQ(first / cluster, c / cluster) << "CTA " << c;
      EXPECT_LT(c - first, item.parts) << "CTA " << c;
      EXPECT_EQ(first / cluster, (first + item.parts - 1) / cluster) << "CTA " << c;
      EXPECT_LE((item.key_end + kGrain - 1) / kGrain - item.key_begin / kGrain, range.cluster_units)
          << "CTA " << c;
    }
    const int32_t tiles = static_cast<int32_t>(all_tiles) * batch().kv_heads;
    const int32_t units = (batch().requests.front().second + kGrain - 1) / kGrain;
    if (!batch().alike || units < kMinUnits * cluster) continue;
    int32_t parts = cluster;  // several tiles may share a cluster
    while (parts > 1 && (parts * tiles > ctas || cluster % parts != 0)) --parts;
    const bool fill = 4 * parts * tiles >= 3 * (ctas / tiles * tiles);
    const bool are_short = units + kOverhead <= (kPartUnits + 1) * parts;
    EXPECT_EQ(in_clusters, parts > 1 && (fill || are_short));
    if (in_clusters) {
      EXPECT_EQ(busy, parts * tiles);
    }
  }
}

TEST_P(Planners, PrefillTakesEveryTileOnceTheHeaviestOfASectionFirst) {
  constexpr int32_t kTokens = 32, kHeadsShift = 1, kTokenBytes = 512, kBlocks = 4;
  size_t bound = 0;
  int32_t longest = 0;
  std::set<std::pair<int32_t, int32_t>> want;
  for (size_t i = 0; i < batch().requests.size(); ++i) {
    const auto [q_len, kv_len] = batch().requests[i];
    bound += static_cast<size_t>((q_len + kTokens - 1) / kTokens);
    if (!batch().planned(i)) continue;
    longest = std::max(longest, kv_len);
    for (int32_t token = 0; token < q_len; token += kTokens) {
      want.insert({static_cast<int32_t>(i), token});
    }
  }
  const Guarded<PrefillTile> tiles(bound);
  const Guarded<PrefillOrder> order(size_t{1});
  const Kernel plan = load("sm90/prefill_order", {"256", "whole"});
  plan.launch({},
              PlanKernelParams<PrefillOrderParams>{{.batch = params,
                                                    .order = order.data(),
                                                    .tiles = tiles.data(),
                                                    .tokens_per_tile = kTokens,
                                                    .heads_shift = kHeadsShift,
                                                    .token_bytes = kTokenBytes,
                                                    .blocks = kBlocks},
                                                   {},
                                                   0},
              nullptr);
  const PrefillOrder found = order.read().front();
  EXPECT_EQ(found.tile_count, static_cast<int32_t>(want.size()));
  EXPECT_EQ(found.taken, 0);
  EXPECT_EQ(found.finished, 0);
  EXPECT_GE(found.section_heads, 1);  // kv heads, each with at least one block of q heads
  const auto list = tiles.read();
  // Sections of requests whose keys take 16 MB, with all heads and two tiles per block.
  const int64_t request_bytes = int64_t{longest} * kTokenBytes * batch().kv_heads;
  int32_t each = params.requests;
  if (request_bytes > 0) each = std::min(each, static_cast<int32_t>((16 << 20) / request_bytes));
  int32_t sections = each > 0 ? (params.requests + each - 1) / each : 1;
  if (sections > 64 || batch().max_planned_q_len > 0 ||
      found.tile_count * (batch().q_heads >> kHeadsShift) < 2 * sections * kBlocks) {
    sections = 1;
  }
  if (sections > 1) {
    EXPECT_EQ(found.section_heads, batch().q_heads >> kHeadsShift);
  }
  // Their tiles are sorted by keys, up to the width of one of 1024 buckets.
  const auto buckets = static_cast<int32_t>(1024 / std::bit_ceil(uint32_t(sections)));
  const int32_t width = std::max(1, 2 * longest / buckets);
  int32_t before = longest, section = 0;
  for (int32_t n = 0; n < found.tile_count; ++n) {
    const PrefillTile tile = list[static_cast<size_t>(n)];
    EXPECT_EQ(want.erase({tile.request, tile.first_token}), 1u)
        << "request " << tile.request << " token " << tile.first_token;
    const auto request = static_cast<size_t>(tile.request);
    const int32_t last = std::min(tile.first_token + kTokens, batch().requests[request].first) - 1;
    const auto [begin, end] = batch().keys(request, tile.first_token, last);
    const int32_t own = sections > 1 ? tile.request / each : 0;
    EXPECT_GE(own, section) << "tile " << n;
    if (own > section) before = longest;
    section = own;
    EXPECT_LE(end - begin, before + width) << "tile " << n;
    before = end - begin;
  }
  EXPECT_TRUE(want.empty());
}

// The pieces of cut tiles have every segment of keys once, and room of their own for partial
// results.
TEST_P(Planners, PrefillCutsTilesOfFewRowsIntoSegments) {
  constexpr int32_t kTokens = 64, kSegment = 512, kRoom = 256;
  const auto requests = static_cast<size_t>(params.requests);
  size_t bound = kRoom;
  for (const auto& [q_len, kv_len] : batch().requests) {
    bound += static_cast<size_t>((q_len + kTokens - 1) / kTokens);
  }
  const Guarded<PrefillTile> tiles(bound);
  const Guarded<TileSegments> tile_segments(bound);
  const Guarded<PrefillOrder> order(size_t{1});
  const Guarded<int32_t> stored(requests * static_cast<size_t>(params.q_heads));
  const Kernel plan = load("sm90/prefill_order", {"256", "cut"});
  plan.launch({},
              PlanKernelParams<PrefillOrderParams>{
                  {.batch = params,
                   .order = order.data(),
                   .tiles = tiles.data(),
                   .tokens_per_tile = kTokens,
                   .heads_shift = 0,
                   .token_bytes = 512,
                   .segments = {.tiles = tile_segments.data(), .stored = stored.data()},
                   .segment_keys = kSegment,
                   .max_partials = kRoom,
                   .blocks = 132},
                  {},
                  0},
              nullptr);
  std::set<std::pair<int32_t, int32_t>> whole;     // request, first token
  std::set<std::pair<int32_t, int32_t>> segments;  // request, segment
  std::map<int32_t, int32_t> room;                 // request, start of its partial results
  const auto list = tiles.read();
  const auto segment_list = tile_segments.read();
  for (int32_t n = 0; n < order.read().front().tile_count; ++n) {
    const PrefillTile tile = list[static_cast<size_t>(n)];
    const TileSegments own = segment_list[static_cast<size_t>(n)];
    const auto [q_len, kv_len] = batch().requests[static_cast<size_t>(tile.request)];
    EXPECT_EQ(std::pair(own.q_len, own.kv_len), std::pair(q_len, kv_len));
    if (own.partial < 0) {
      EXPECT_TRUE(whole.insert({tile.request, tile.first_token}).second);
      continue;
    }
    EXPECT_EQ(room.try_emplace(tile.request, own.partial).first->second, own.partial);
    for (int32_t segment = own.begin; segment < own.end; ++segment) {
      EXPECT_TRUE(segments.insert({tile.request, segment}).second)
          << "request " << tile.request << " segment " << segment;
    }
  }
  std::set<int32_t> taken;  // slots of partial results
  for (size_t i = 0; i < batch().requests.size(); ++i) {
    const auto request = static_cast<int32_t>(i);
    const int32_t q_len = batch().planned(i) ? batch().requests[i].first : 0;
    if (!room.contains(request)) {
      for (int32_t token = 0; token < q_len; token += kTokens) {
        EXPECT_EQ(whole.erase({request, token}), 1u) << "request " << i << " token " << token;
      }
      continue;
    }
    ASSERT_LE(q_len, kTokens);
    const auto [begin, end] = batch().keys(i, 0, q_len - 1);
    int32_t place = room[request];
    for (int32_t segment = begin / kSegment; segment * kSegment < end; ++segment) {
      EXPECT_EQ(segments.erase({request, segment}), 1u)
          << "request " << i << " segment " << segment;
      for (int32_t token = 0; token < q_len; ++token, ++place) {
        EXPECT_LT(place, kRoom);
        EXPECT_TRUE(taken.insert(place).second) << "request " << i;
      }
    }
  }
  EXPECT_TRUE(whole.empty() && segments.empty()) << "tiles without a request";
  if (room.empty()) return;
  for (const int32_t count : stored.read()) EXPECT_EQ(count, 0);
}

INSTANTIATE_TEST_SUITE_P(All, Planners, ::testing::ValuesIn(batches()),
                         [](const auto& param) { return param.param.name; });

}  // namespace
}  // namespace fovea::kernels::cuda
