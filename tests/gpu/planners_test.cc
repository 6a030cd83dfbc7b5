// SPDX-License-Identifier: Apache-2.0
// The work lists that the Hopper planners write from device-side lengths: everything once, in the
// promised order, evenly, and inside the promised bounds. Skipped where there is no Hopper GPU;
// tests/emulation runs them on the CPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <tuple>
#include <vector>

#include "attention/prefix_levels.h"
#include "gpu/gpu.h"
#include "kernels/cuda/common/decode_params.h"
#include "kernels/cuda/common/plan_launch.h"
#include "kernels/cuda/common/prefill_params.h"
#include "kernels/cuda/common/prefix_params.h"
#include "support/gpu_kernel_test.h"

namespace fovea::kernels::cuda {
namespace {

constexpr int32_t kGrain = 16, kOverhead = 4;  // of the baked decode plans
constexpr int32_t kGuard = 0x5a5a5a5a;

struct Batch {
  std::string name;
  std::vector<std::pair<int32_t, int32_t>> requests;  // q_len, kv_len
  int32_t q_heads = 8, kv_heads = 2;
  int32_t window = 0;
  int32_t least_q_len = 0, most_q_len = 0;  // of the plan

  bool planned(size_t i) const {
    const int32_t q_len = requests[i].first;
    return most_q_len == 0 || (q_len >= least_q_len && q_len <= most_q_len);
  }
  int32_t group() const { return q_heads / kv_heads; }
  // Keys that tokens [first, last] see: causal, window.
  std::pair<int32_t, int32_t> keys(size_t i, int32_t first, int32_t last) const {
    const auto [q_len, kv_len] = requests[i];
    const int32_t prefix = kv_len - q_len;
    const int32_t begin = window ? std::max(0, prefix + first - window + 1) : 0;
    const int32_t end = std::max(0, std::min(kv_len, prefix + last + 1));
    return {begin, std::max(begin, end)};
  }
};

void PrintTo(const Batch& batch, std::ostream* to) { *to << batch.name; }

std::vector<Batch> batches() {
  std::vector<Batch> all = {
      {"one", {{1, 1}}},
      {"one_long", {{1, 70000}}, 32, 8},
      {"empties", {{0, 0}, {1, 0}, {0, 50}, {1, 33}, {2, 2}}},
      {"rows", {{1, 900}, {8, 900}, {17, 900}, {3, 3}}, 6, 2},
      {"window", {{1, 5000}, {4, 90}, {5, 1700}}, 8, 2, 100},
      {"mixed_short", {{300, 300}, {1, 6000}, {8, 100}, {9, 100}, {1, 1}}, 8, 2, 0, 0, 8},
      {"mixed_long", {{300, 300}, {1, 6000}, {8, 100}, {9, 100}, {131, 1400}}, 8, 2, 0, 9, 1 << 30},
      {"mixed_none", {{300, 300}, {40, 100}}, 8, 2, 0, 0, 8},
  };
  std::mt19937 random(3);
  for (const int32_t count : {64, 300, 1500}) {
    Batch batch{"random_" + std::to_string(count), {}, 32, 8};
    for (int32_t i = 0; i < count; ++i) {
      const auto kv_len = static_cast<int32_t>(random() % 3000);
      batch.requests.push_back({std::min(kv_len, 1 + static_cast<int32_t>(random() % 3)), kv_len});
    }
    all.push_back(batch);
  }
  return all;
}

// Device memory of `count` elements before a guard that must stay.
template <typename T>
class Guarded {
 public:
  explicit Guarded(size_t count) : count_(count), buffer_(count * sizeof(T) + kBytes) {
    gpu::fill_bytes(buffer_.data(), kGuard & 0xff, buffer_.bytes(), nullptr);
  }
  explicit Guarded(const std::vector<T>& values) : Guarded(values.size()) {
    gpu::copy_to_device(data(), values.data(), values.size() * sizeof(T), nullptr);
  }
  T* data() const { return buffer_.template data<T>(); }
  std::vector<T> read() const {
    std::vector<T> values(count_);
    gpu::copy_to_host(values.data(), buffer_.data(), count_ * sizeof(T), nullptr);
    std::vector<uint8_t> guard(kBytes);
    gpu::copy_to_host(guard.data(), reinterpret_cast<const uint8_t*>(data() + count_), kBytes,
                      nullptr);
    gpu::synchronize(nullptr);
    EXPECT_TRUE(std::ranges::all_of(guard, [](uint8_t b) { return b == (kGuard & 0xff); }))
        << "written behind " << count_ << " elements";
    return values;
  }

 private:
  static constexpr size_t kBytes = 4096;
  size_t count_;
  gpu::DeviceBuffer buffer_;
};

class Planners : public test::GpuKernelTest<::testing::TestWithParam<Batch>, 90> {
 protected:
  void SetUp() override {
    GpuKernelTest::SetUp();
    if (IsSkipped()) return;
    std::vector<int32_t> indptr{0}, lens;
    for (const auto& [q_len, kv_len] : batch().requests) {
      indptr.push_back(indptr.back() + q_len);
      lens.push_back(kv_len);
    }
    q_indptr_host = indptr;
    q_indptr.emplace(indptr);
    kv_lens.emplace(lens);
    params.q_indptr = q_indptr->data();
    params.kv_lens = kv_lens->data();
    params.requests = static_cast<int32_t>(lens.size());
    params.q_heads = batch().q_heads;
    params.kv_heads = batch().kv_heads;
    params.least_q_len = batch().least_q_len;
    params.most_q_len = batch().most_q_len;
    params.mask.causal = 1;
    params.mask.window = batch().window;
  }
  const Batch& batch() const { return GetParam(); }

  std::vector<int32_t> q_indptr_host;
  std::optional<Guarded<int32_t>> q_indptr, kv_lens;
  BatchParams params{};
};

struct DecodePart {
  DecodeItem item;
  int32_t range;
};

TEST_P(Planners, DecodeCoversEveryKeyOnceInEqualRanges) {
  constexpr int32_t kRowTile = 8;
  const int32_t group = batch().group();
  int64_t all_tiles = 0;  // also of requests that are not the plan's: the bound holds for any batch
  for (const auto& [q_len, kv_len] : batch().requests) {
    all_tiles += (q_len * group + kRowTile - 1) / kRowTile;
  }
  const Kernel plan = load("sm90/decode_plan", {"8", "16", "4"});
  for (const int32_t ctas : {1, 7, 132}) {
    SCOPED_TRACE(ctas);
    const Guarded<DecodeItem> items(static_cast<size_t>(all_tiles * batch().kv_heads + ctas));
    const Guarded<DecodeRange> ranges(static_cast<size_t>(ctas));
    const Guarded<int32_t> tickets(static_cast<size_t>(2 * ctas));
    DecodePlanParams list{};
    list.batch = params;
    list.list.items = items.data();
    list.list.ranges = ranges.data();
    list.list.tickets = tickets.data();
    list.list.ctas = ctas;
    list.list.max_heads = 2;
    list.list.least_units = 1;
    list.least_ctas = (ctas + 1) / 2;
    list.pairs_per_unit = 100;
    plan.launch({4}, PlanLaunch<DecodePlanParams>{list, {}, 0}, nullptr);

    const auto all_items = items.read();
    std::map<std::tuple<int32_t, int32_t, int32_t>, std::vector<DecodePart>> tiles;
    std::set<int32_t> slots;
    int64_t line = 0;
    int32_t live = 0, heads = 0;
    std::vector<int64_t> loads;
    const auto all_ranges = ranges.read();
    for (int32_t c = 0; c < ctas; ++c) {
      const DecodeRange& range = all_ranges[static_cast<size_t>(c)];
      if (range.begin == range.end) continue;
      ++live;
      EXPECT_EQ(std::memcmp(&range.first, &all_items[static_cast<size_t>(range.begin)],
                            sizeof(DecodeItem)),
                0);
      int64_t load = 0;
      for (int32_t i = range.begin; i < range.end; ++i) {
        const DecodeItem& item = all_items[static_cast<size_t>(i)];
        heads = item.heads;
        load += (item.key_end + kGrain - 1) / kGrain - item.key_begin / kGrain;
        tiles[{item.request, item.kv_head, item.first_row}].push_back({item, c});
        if (item.partial >= 0) {
          EXPECT_TRUE(slots.insert(item.partial).second) << "slot " << item.partial << " twice";
          EXPECT_TRUE(item.partial == 2 * c || item.partial == 2 * c + 1);
        }
      }
      loads.push_back(load);
    }
    int64_t want = 0;
    for (size_t i = 0; i < batch().requests.size(); ++i) {
      const auto [q_len, kv_len] = batch().requests[i];
      if (!batch().planned(i)) continue;
      for (int32_t row = 0; row < q_len * group; row += kRowTile) {
        const int32_t last = std::min(row + kRowTile, q_len * group) - 1;
        const auto [begin, end] = batch().keys(i, row / group, last / group);
        line += std::max((end + kGrain - 1) / kGrain - begin / kGrain, 1) + kOverhead;
        for (int32_t head = 0; head < batch().kv_heads; head += std::max(heads, 1), ++want) {
          const auto& parts = tiles[{static_cast<int32_t>(i), head, row}];
          ASSERT_FALSE(parts.empty()) << "request " << i << " head " << head << " row " << row;
          int32_t key = begin;
          for (size_t part = 0; part < parts.size(); ++part) {
            const DecodeItem& item = parts[part].item;
            EXPECT_EQ(item.key_begin, key);
            key = item.key_end;
            EXPECT_EQ(item.q_begin, q_indptr_host[i]);
            EXPECT_EQ(item.q_len, q_len);
            EXPECT_EQ(item.kv_len, kv_len);
            EXPECT_EQ(item.parts, static_cast<int32_t>(parts.size()));
            EXPECT_EQ(item.partial < 0, parts.size() == 1);
            if (parts.size() == 1) continue;
            const int32_t slot =
                part == 0 ? item.first_part : item.first_part + 2 * static_cast<int32_t>(part) - 1;
            EXPECT_EQ(item.partial, slot) << "part " << part;
          }
          EXPECT_EQ(key, end);
        }
      }
    }
    EXPECT_EQ(static_cast<int64_t>(tiles.size()), want) << "tiles of nobody";
    if (want == 0) continue;
    line *= batch().kv_heads / heads;
    // Equal cuts. A CTA may lie in the overhead of an item, and the plan may use fewer CTAs than
    // there are for the sake of whole tiles, or to leave SMs to the kernel beside.
    EXPECT_LE(std::ranges::max(loads), (line + live - 1) / live);
    const int32_t expected = batch().most_q_len > 0 ? list.least_ctas : ctas;
    EXPECT_GE(2 * (kOverhead + 1) * live, std::min<int64_t>(expected, line / 8));
    for (const int32_t part : slots) EXPECT_EQ(tickets.read()[static_cast<size_t>(part)], 0);
  }
}

TEST_P(Planners, PrefillTakesEveryTileOnceTheHeaviestFirst) {
  constexpr int32_t kTokens = 32, kHeadsShift = 0;
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
              PlanLaunch<PrefillOrderParams>{{.batch = params,
                                              .order = order.data(),
                                              .tiles = tiles.data(),
                                              .tokens_per_tile = kTokens,
                                              .heads_shift = kHeadsShift,
                                              .token_bytes = 512},
                                             {},
                                             0},
              nullptr);
  const PrefillOrder found = order.read().front();
  EXPECT_EQ(found.tile_count, static_cast<int32_t>(want.size()));
  EXPECT_EQ(found.taken, 0);
  EXPECT_EQ(found.finished, 0);
  EXPECT_GE(found.section_heads, 1);  // of kv heads, each with a block of q heads at least
  const auto list = tiles.read();
  // Tiles are sorted by keys up to the width of one of 1024 buckets.
  const int32_t width = std::max(1, 2 * longest / 1024);
  int32_t before = longest;
  for (int32_t n = 0; n < found.tile_count; ++n) {
    const PrefillTile tile = list[static_cast<size_t>(n)];
    EXPECT_EQ(want.erase({tile.request, tile.first_token}), 1u)
        << "request " << tile.request << " token " << tile.first_token;
    const auto request = static_cast<size_t>(tile.request);
    const int32_t last = std::min(tile.first_token + kTokens, batch().requests[request].first) - 1;
    const auto [begin, end] = batch().keys(request, tile.first_token, last);
    EXPECT_LE(end - begin, before + width) << "tile " << n;
    before = end - begin;
  }
  EXPECT_TRUE(want.empty());
}

// Blocks behind those that order write the page table, whatever their number: from slots or pages,
// through a slot map, page 0 for what names nothing of the pool, zeros up to the key tile, nothing
// behind.
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
    PlanLaunch<PrefillOrderParams> launch{{.batch = params,
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

// Pieces of cut tiles have every segment of keys once, and room of their own for partial results.
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
              PlanLaunch<PrefillOrderParams>{
                  {.batch = params,
                   .order = order.data(),
                   .tiles = tiles.data(),
                   .tokens_per_tile = kTokens,
                   .heads_shift = 0,
                   .token_bytes = 512,
                   .segments = {.tiles = tile_segments.data(), .stored = stored.data()},
                   .segment_keys = kSegment,
                   .most_partials = kRoom,
                   .blocks = 132},
                  {},
                  0},
              nullptr);
  std::set<std::pair<int32_t, int32_t>> whole;     // request, first token
  std::set<std::pair<int32_t, int32_t>> segments;  // request, segment
  std::map<int32_t, int32_t> room;                 // request, where its partial results begin
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
  std::set<int32_t> taken;  // places for partial results
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
  EXPECT_TRUE(whole.empty() && segments.empty()) << "tiles of nobody";
  if (room.empty()) return;
  for (const int32_t count : stored.read()) EXPECT_EQ(count, 0);
}

// The device finds the groups that the host finds.
TEST_P(Planners, PrefixGroupsAreThoseOfTheHost) {
  if (batch().most_q_len > 0 || batch().window > 0) GTEST_SKIP() << "not where prefixes are shared";
  const auto requests = static_cast<size_t>(params.requests);
  std::mt19937 random(9);
  std::vector<int32_t> shared(requests), lens = kv_lens->read();
  for (int32_t& tokens : shared) {
    tokens = random() % 4 == 0 ? 0 : static_cast<int32_t>(random() % 3000);
  }
  constexpr int32_t kMostQLen = 2, kLeastSaved = 5000;
  BatchView view;
  view.requests = params.requests;
  view.q_indptr = q_indptr_host.data();
  view.kv_lens = lens.data();
  view.shared_prefix = shared.data();

  std::vector<std::vector<int32_t>> host;
  std::vector<PrefixLevel> levels;
  host.reserve(3 * kPrefixLevels + 1);
  for (int32_t i = 0; i < kPrefixLevels; ++i) {
    levels.push_back({host.emplace_back(requests + 1).data(), host.emplace_back(requests).data(),
                      host.emplace_back(requests).data()});
  }
  int32_t* first_keys = host.emplace_back(requests).data();
  const int32_t used = find_prefix_levels(view, {kMostQLen, kLeastSaved}, levels, first_keys);

  const Guarded<int32_t> shared_device(shared);
  // Plans of no request of their own, with other numbers of threads.
  const auto finds = [&](auto launch) {
    PrefixGroupsParams prefixes{.q_indptr = params.q_indptr,
                                .kv_lens = params.kv_lens,
                                .shared_prefix = shared_device.data(),
                                .requests = params.requests,
                                .most_q_len = kMostQLen,
                                .least_prefix = kLeastPrefix,
                                .least_saved = kLeastSaved,
                                .levels = kPrefixLevels};
    std::vector<Guarded<int32_t>> device;
    device.reserve(3 * kPrefixLevels + 2);
    const auto take = [&](size_t count) { return device.emplace_back(count).data(); };
    for (PrefixGroups& groups : prefixes.groups) {
      groups = {take(requests + 1), take(requests), take(requests)};
    }
    prefixes.first_keys = take(requests);
    prefixes.scratch = take(requests * kPrefixScratch);  // of one block
    launch(PlanCompany{.prefixes = prefixes});
    for (size_t i = 0; i < static_cast<size_t>(3 * used); ++i) {
      EXPECT_EQ(device[i].read(), host[i]) << "level " << i / 3 << " array " << i % 3;
    }
    EXPECT_EQ(device[3 * kPrefixLevels].read(), host.back());
    for (size_t i = static_cast<size_t>(3 * used); i < 3 * kPrefixLevels; i += 3) {
      EXPECT_EQ(device[i + 1].read(), std::vector<int32_t>(requests, 0))
          << "groups at level " << i / 3;
    }
    device[3 * kPrefixLevels + 1].read();  // guards
  };
  BatchParams nobody{};
  nobody.q_heads = nobody.kv_heads = 1;
  finds([&](const PlanCompany& company) {
    load("portable/plan", {"16"})
        .launch({}, PlanLaunch<PlanParams>{{.batch = nobody}, company, 0}, nullptr);
  });
  const Guarded<PrefillOrder> order(size_t{1});
  finds([&](const PlanCompany& company) {
    load("sm90/prefill_order", {"256", "whole"})
        .launch({},
                PlanLaunch<PrefillOrderParams>{
                    {.batch = nobody, .order = order.data(), .tokens_per_tile = 1}, company, 0},
                nullptr);
  });
}

INSTANTIATE_TEST_SUITE_P(All, Planners, ::testing::ValuesIn(batches()),
                         [](const auto& param) { return param.param.name; });

}  // namespace
}  // namespace fovea::kernels::cuda
