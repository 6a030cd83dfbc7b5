// SPDX-License-Identifier: Apache-2.0
// Prefixes that requests of a pass share: found in the table of slots, ordered next to each other,
// read once by the backends.
#include "engine/shared_prefixes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <span>
#include <vector>

#include "attention/prefix_levels.h"
#include "engine/small_engine.h"

namespace fovea {
namespace {

constexpr int32_t kPage = 8;

// Rows of a table. They begin with pages of row 1.
struct Rows {
  Rows() : table(8, 2048) {}

  // Adds a request with `tokens` cached tokens, the first `shared` of them from row 1, and a new
  // one.
  const CacheLease* add(int32_t shared, int32_t tokens) {
    const int32_t row = table.allocate().value();
    const std::span<int32_t> slots = table.row(row);
    std::iota(slots.begin(), slots.begin() + tokens + 1, row * 10000 * kPage);
    std::copy_n(table.row(1).begin(), shared, slots.begin());
    leases.push_back(CacheLease{.row = row, .tokens = tokens + 1});
    return &leases.back();
  }
  PassPart part(int32_t shared, int32_t tokens, size_t new_tokens = 1) {
    return {std::span(text).first(new_tokens), tokens, add(shared, tokens), 1};
  }

  RequestTable table;
  std::vector<int32_t> text = std::vector<int32_t>(64, 5);
  std::vector<CacheLease> leases = [] {
    std::vector<CacheLease> room;
    room.reserve(8);
    return room;
  }();
};

// 2 kv heads of 64 in fp32: 1024 bytes per key.
std::vector<GroupSelection> one_group(bool batch_invariant = false) {
  GroupSelection group;
  group.request.spec = {.q_heads = 4, .kv_heads = 2, .head_dim = 64, .head_dim_v = 64};
  group.request.spec.batch_invariant = batch_invariant;
  group.request.cache = {.layers = 1, .kv_heads = 2, .head_dim = 64, .head_dim_v = 64};
  group.request.cache.page_size = kPage;
  return {group};
}

BatchLimits limits_of(int32_t levels, int64_t savings) {
  return {.max_requests = 8,
          .max_tokens = 128,
          .max_kv_len = 2048,
          .prefix_levels = levels,
          .min_prefix_savings = savings};
}

TEST(SharedPrefixes, AreTheFirstPagesThatNeighboursHaveInCommon) {
  const SharedPrefixes prefixes(one_group(), limits_of(1, 1));
  Rows rows;
  const std::vector<PassPart> parts = {rows.part(0, 700), rows.part(512, 1000), rows.part(608, 900),
                                       rows.part(304, 310), rows.part(0, 800)};
  std::vector<int32_t> shared(8, -1);
  EXPECT_TRUE(prefixes.find(parts, rows.table, shared));
  shared.resize(parts.size());
  // The third has the first 608 tokens of row 1, the second only the first 512.
  EXPECT_EQ(shared, (std::vector<int32_t>{0, 512, 512, 304, 0}));
}

TEST(SharedPrefixes, AreNamedWhereTheySaveEnough) {
  Rows rows;
  const std::vector<PassPart> parts = {rows.part(0, 700), rows.part(512, 1000),
                                       rows.part(512, 900)};
  std::vector<int32_t> shared(parts.size());
  const auto named = [&](int32_t levels, int64_t savings, bool batch_invariant) {
    const SharedPrefixes prefixes(one_group(batch_invariant), limits_of(levels, savings));
    return prefixes.find(parts, rows.table, shared);
  };
  EXPECT_TRUE(named(1, 2 * 512 * 1024, false));
  EXPECT_FALSE(named(1, 2 * 512 * 1024 + 1, false));
  EXPECT_FALSE(named(0, 1, false));
  EXPECT_FALSE(named(1, 1, true));
}

// A page that one of the two requests has not filled is not shared, although its first slot is the
// same.
TEST(SharedPrefixes, AreWholePagesOfBoth) {
  const SharedPrefixes prefixes(one_group(), limits_of(1, 1));
  struct Case {
    int32_t first, second;  // tokens; the second has the slots of the first, as far as it has room
    int32_t shared;         // 0: too few to be useful
  };
  for (const Case& c : {Case{720, 703, 696},
                        {720, 704, 704},
                        {720, 705, 704},
                        {700, 720, 696},
                        {300, kMinPrefix, kMinPrefix},
                        {300, kMinPrefix - 1, 0}}) {
    Rows rows;
    const std::vector<PassPart> parts = {rows.part(0, c.first),
                                         rows.part(std::min(c.first + 1, c.second), c.second)};
    std::vector<int32_t> shared(2);
    EXPECT_EQ(prefixes.find(parts, rows.table, shared), c.shared > 0);
    if (c.shared > 0) {
      EXPECT_EQ(shared[1], c.shared);
    }
  }
}

TEST(SharedPrefixes, AreSharedIfTheySaveEnoughForOneGroup) {
  std::vector<GroupSelection> groups = {one_group()[0], one_group()[0]};
  for (const size_t larger : {0u, 1u}) {  // keys of twice the bytes: half as many suffice
    groups[0] = groups[1] = one_group()[0];
    AttentionSpec& spec = groups[larger].request.spec;
    KvCacheSpec& cache = groups[larger].request.cache;
    spec.kv_heads = cache.kv_heads = 4;
    const SharedPrefixes prefixes(groups, limits_of(1, 2048 * 400));
    EXPECT_TRUE(prefixes.possible(2, 400));
    EXPECT_FALSE(prefixes.possible(2, 399));
  }
  Rows rows;
  const std::vector<PassPart> parts = {rows.part(0, 700), rows.part(0, 700)};
  std::vector<int32_t> shared(2);
  EXPECT_FALSE(SharedPrefixes(one_group(), limits_of(1, 0)).find(parts, rows.table, shared))
      << "nothing is shared";
}

TEST(SharedPrefixes, AreNotSharedByPrompts) {
  const SharedPrefixes prefixes(one_group(), limits_of(1, 1));
  Rows rows;
  const std::vector<PassPart> parts = {rows.part(0, 700), rows.part(512, 512, 40),
                                       rows.part(512, 600)};
  std::vector<int32_t> shared(parts.size());
  EXPECT_FALSE(prefixes.find(parts, rows.table, shared));
  EXPECT_EQ(shared, std::vector<int32_t>(3, 0));
}

// Two rows of q per token: a group may have requests of up to 16 new tokens.
TEST(SharedPrefixes, AreNotNamedNextToLongPrompts) {
  BatchLimits limits = limits_of(1, 1);
  limits.max_requests = 3;
  Rows rows;
  std::vector<int32_t> shared(3);
  const std::vector<PassPart> most = {rows.part(0, 700), rows.part(512, 700), rows.part(0, 9, 46)};
  EXPECT_TRUE(SharedPrefixes(one_group(), limits).find(most, rows.table, shared));
  const std::vector<PassPart> more = {most[0], most[1], rows.part(0, 9, 47)};
  EXPECT_FALSE(SharedPrefixes(one_group(), limits).find(more, rows.table, shared));
}

TEST(SharedPrefixes, ArePossibleWhereEnoughRequestsHaveRoomForThem) {
  const BatchLimits limits = limits_of(1, 300 * 1024);
  const SharedPrefixes prefixes(one_group(), limits);
  EXPECT_FALSE(prefixes.possible(3, 100));
  EXPECT_TRUE(prefixes.possible(4, 100));
  EXPECT_FALSE(prefixes.possible(4, 99));
  EXPECT_FALSE(SharedPrefixes(one_group(), limits_of(0, 0)).possible(4, 100));
}

TEST(SharedPrefixes, LandmarksAreFirstSlotsOfPagesAtGrowingDistances) {
  std::vector<int32_t> slots(4 * 64);
  std::iota(slots.begin(), slots.end(), 1);
  const PageLandmarks all = page_landmarks(slots, 4);
  size_t page = 0;
  for (size_t i = 0; i < all.size() && page < 64; ++i, page = 2 * page + 1)
    EXPECT_EQ(all[i], slots[4 * page]) << i;
  const PageLandmarks few = page_landmarks(std::span(slots).first(12), 4);
  EXPECT_EQ(few[1], slots[4]);
  EXPECT_EQ(few[2], 0) << "the fourth page is not there";
}

// Three versions of each of two prompts.
TEST(SharedPrefixes, LandmarksOrderRequestsByWhatTheyShare) {
  std::vector<std::vector<int32_t>> requests(6);
  for (size_t i = 0; i < requests.size(); ++i) {
    requests[i].resize(1024);
    std::iota(requests[i].begin(), requests[i].end(), static_cast<int32_t>(i) * 4096);
    const auto copy = [&](size_t from, int64_t tokens) {
      std::copy_n(requests[from].begin(), tokens, requests[i].begin());
    };
    if (i == 2) copy(0, 320);
    if (i == 5) copy(0, 600);
    if (i == 3 || i == 4) copy(1, 128);
  }
  std::vector<size_t> order = {0, 1, 4, 2, 3, 5};
  std::ranges::stable_sort(order, {}, [&](size_t i) { return page_landmarks(requests[i], kPage); });
  EXPECT_EQ(order, (std::vector<size_t>{0, 5, 2, 1, 3, 4}));
}

TEST(SharedPrefixes, EngineReadsThemOnceAndWritesTheSameText) {
  const std::vector<ReferencePrompt> prompts = read_reference("llama");
  EngineOptions options = small_options();
  options.max_context = 1024;
  options.min_prefix_savings = 1;
  options.max_batch_tokens = 256;
  for (const int32_t levels : {0, 2}) {
    options.prefix_levels = levels;
    const std::unique_ptr<Engine> engine = Engine::load(options);
    GenerateRequest request = greedy_request(prompts[4]);
    // Others share 512 of its 700 tokens; between them is a request that shares nothing.
    GenerateRequest other = request;
    for (size_t i = 512; i < other.tokens.size(); ++i) other.tokens[i] = request.tokens[i - 300];
    const GenerateRequest unrelated = greedy_request(prompts[2]);
    (void)engine->generate({&request, 1});
    const std::vector<GenerateRequest> requests = {request, unrelated, other, request};
    const std::vector<GenerateResult> results = engine->generate(requests);
    EXPECT_EQ(results[0].tokens, prompts[4].greedy);
    EXPECT_EQ(results[1].tokens, prompts[2].greedy);
    EXPECT_EQ(results[3].tokens, prompts[4].greedy);
    EXPECT_GT(results[2].cached_tokens, 500);
    EXPECT_EQ(engine->stats().shared_steps > 0, levels > 0);
    EXPECT_EQ(engine->explain().find("shared prefixes are read once, in up to 2 levels") !=
                  std::string::npos,
              levels > 0);
    expect_no_leak(*engine);
  }
}

}  // namespace
}  // namespace fovea
