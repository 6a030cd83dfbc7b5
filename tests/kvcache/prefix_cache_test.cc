// SPDX-License-Identifier: Apache-2.0
#include "fovea/prefix_cache.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <ctime>
#include <memory>
#include <numeric>
#include <set>
#include <string>
#include <unordered_set>
#include <vector>

#include "support/cases.h"
#include "support/expect_error.h"

namespace fovea {
namespace {

using test::expect_invalid;

constexpr int32_t kPageSize = 4;
const PrefixDomain kDomain{.model = "m", .adapter = "", .kv_format = "f32", .salt = ""};

std::vector<int32_t> sequence(int32_t first, int32_t length) {
  std::vector<int32_t> tokens(static_cast<size_t>(length));
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

// Stores `tokens` as a request does that computes them and ends: afterwards only the tree owns the
// pages. Returns the pages.
std::vector<int64_t> store(PrefixCache& cache, PageAllocator& allocator,
                           const std::vector<int32_t>& tokens, const PrefixDomain& domain = kDomain,
                           int32_t state_slot = -1) {
  std::vector<int64_t> pages;
  EXPECT_TRUE(allocator.allocate(static_cast<int64_t>(tokens.size()) / kPageSize, pages));
  cache.insert(domain, tokens, pages, state_slot);
  for (const int64_t page : pages) allocator.release(page);
  return pages;
}

// Returns the number of tokens served, and gives the pages back at once.
int32_t served(PrefixCache& cache, PageAllocator& allocator, const std::vector<int32_t>& tokens,
               const PrefixDomain& domain = kDomain) {
  const PrefixMatch match = cache.match(domain, tokens, static_cast<int32_t>(tokens.size()));
  EXPECT_EQ(match.pages.size() * kPageSize, static_cast<size_t>(match.tokens));
  for (const int64_t page : match.pages) allocator.release(page);
  return match.tokens;
}

TEST(PrefixKey, FieldsCannotImitateEachOther) {
  std::set<PrefixKey> keys;
  const std::vector<PrefixDomain> domains{
      {},
      {.model = "A"},
      {.adapter = "A"},
      {.kv_format = "A"},
      {.salt = "A"},
      {.model = "A", .adapter = "B"},
      {.model = "AB"},
      {.model = "A", .salt = "B"},
      {.model = "A", .adapter = std::string_view("B\0s", 3)},
  };
  for (const PrefixDomain& domain : domains) keys.insert(prefix_root_key(domain));
  EXPECT_EQ(keys.size(), domains.size());
  const PrefixKey root = prefix_root_key({});
  keys.insert(root);
  for (const auto& tokens : {sequence(1, 2), sequence(1, 3), sequence(0, 2), sequence(0, 0)}) {
    keys.insert(prefix_page_key(root, tokens));
    keys.insert(prefix_page_key(prefix_page_key(root, tokens), tokens));
  }
  EXPECT_EQ(keys.size(), domains.size() + 8);
  EXPECT_EQ(prefix_page_key(root, sequence(1, 2)), prefix_page_key(root, sequence(1, 2)));
}

TEST(PrefixKey, ManyKeysAreDistinct) {
  std::unordered_set<std::string> keys;
  PrefixKey key = prefix_root_key(kDomain);
  const int count = 100000 * std::min(test::test_scale(), 100);
  for (int i = 0; i < count; ++i) {
    const PrefixKey next = prefix_page_key(key, sequence(i % 3, kPageSize));
    if (i % 7 == 0) key = next;
    const PrefixKey leaf = prefix_page_key(key, sequence(i, kPageSize));
    keys.emplace(leaf.begin(), leaf.end());
  }
  EXPECT_EQ(keys.size(), static_cast<size_t>(count));
}

TEST(PrefixCache, ServesFullPagesOfTheLongestPrefix) {
  PageAllocator allocator(20, kPageSize);
  PrefixCache cache(allocator, nullptr);
  EXPECT_EQ(served(cache, allocator, sequence(0, 12)), 0);
  const auto pages = store(cache, allocator, sequence(0, 10));  // two full pages
  EXPECT_EQ(cache.stats().pages, 2);
  EXPECT_EQ(allocator.free_pages(), 17);

  const PrefixMatch match = cache.match(kDomain, sequence(0, 20), 19);
  EXPECT_EQ(match.tokens, 8);
  EXPECT_EQ(match.pages, (std::vector<int64_t>{pages[0], pages[1]}));
  EXPECT_EQ(match.state_slot, -1);
  EXPECT_EQ(allocator.references(pages[0]), 2);
  for (const int64_t page : match.pages) allocator.release(page);

  std::vector<int32_t> other = sequence(0, 8);
  other[5] = -7;
  EXPECT_EQ(served(cache, allocator, other), 4);
  EXPECT_EQ(served(cache, allocator, sequence(4, 4)), 0) << "a page is its whole prefix";
  EXPECT_EQ(cache.stats().queries, 12 + 19 + 8 + 4);
  EXPECT_EQ(cache.stats().hits, 8 + 4);
}

// Prompts one token short of, at and past the end of a page.
TEST(PrefixCache, LengthsAroundAPage) {
  for (int32_t stored = 0; stored <= 9; ++stored) {
    for (int32_t asked = 0; asked <= 9; ++asked) {
      for (int32_t limit = 0; limit <= 9; ++limit) {
        PageAllocator allocator(20, kPageSize);
        PrefixCache cache(allocator, nullptr);
        store(cache, allocator, sequence(0, stored));
        const PrefixMatch match = cache.match(kDomain, sequence(0, asked), limit);
        EXPECT_EQ(match.tokens, std::min({stored, asked, limit}) / kPageSize * kPageSize);
      }
    }
  }
}

TEST(PrefixCache, DomainsNeverShare) {
  PageAllocator allocator(20, kPageSize);
  PrefixCache cache(allocator, nullptr);
  const PrefixDomain lora{.model = "m", .adapter = "A"};
  const PrefixDomain salt{.model = "m", .salt = "A"};
  store(cache, allocator, sequence(0, 8), lora);
  EXPECT_EQ(served(cache, allocator, sequence(0, 8), lora), 8);
  EXPECT_EQ(served(cache, allocator, sequence(0, 8), salt), 0);
  store(cache, allocator, sequence(0, 8), salt);
  EXPECT_EQ(cache.stats().pages, 4);
  EXPECT_EQ(served(cache, allocator, sequence(0, 8), salt), 8);
}

TEST(PrefixCache, TheFirstPageOffersStays) {
  PageAllocator allocator(20, kPageSize);
  PrefixCache cache(allocator, nullptr);
  const auto first = store(cache, allocator, sequence(0, 8));
  const auto second = store(cache, allocator, sequence(0, 12));
  EXPECT_EQ(cache.stats().pages, 3);
  const PrefixMatch match = cache.match(kDomain, sequence(0, 12), 12);
  EXPECT_EQ(match.pages, (std::vector<int64_t>{first[0], first[1], second[2]}));
  EXPECT_EQ(allocator.free_pages(), 16) << "duplicates went back with their owner";
}

TEST(PrefixCache, EvictsLeastRecentlyUsedLeavesFirst) {
  PageAllocator allocator(20, kPageSize);
  PrefixCache cache(allocator, nullptr);
  const auto a = store(cache, allocator, sequence(0, 8));
  const auto b = store(cache, allocator, sequence(100, 8));
  const auto c = store(cache, allocator, sequence(200, 4));
  EXPECT_EQ(served(cache, allocator, sequence(0, 8)), 8);
  EXPECT_EQ(cache.evict(2), (std::vector<int64_t>{b[1], b[0]}));
  EXPECT_EQ(cache.evict(2), (std::vector<int64_t>{c[0], a[1]}));
  EXPECT_EQ(served(cache, allocator, sequence(0, 8)), 4);
  EXPECT_EQ(cache.evict(10), (std::vector<int64_t>{a[0]}));
  EXPECT_EQ(cache.evict(10), std::vector<int64_t>{});
  EXPECT_EQ(allocator.free_pages(), 19);
  EXPECT_EQ(cache.stats().pages, 0);
  EXPECT_EQ(cache.stats().evicted_pages, 5);
}

TEST(PrefixCache, PagesInUseStay) {
  PageAllocator allocator(20, kPageSize);
  PrefixCache cache(allocator, nullptr);
  const auto pages = store(cache, allocator, sequence(0, 16));
  const PrefixMatch match = cache.match(kDomain, sequence(0, 8), 8);
  EXPECT_EQ(cache.clear(), (std::vector<int64_t>{pages[3], pages[2]}));
  EXPECT_EQ(allocator.references(pages[1]), 2);
  allocator.release(match.pages[1]);
  EXPECT_EQ(cache.clear(), (std::vector<int64_t>{pages[1]}));
  allocator.release(match.pages[0]);
  EXPECT_EQ(cache.clear(), (std::vector<int64_t>{pages[0]}));
}

TEST(PrefixCache, PinsNest) {
  PageAllocator allocator(20, kPageSize);
  PrefixCache cache(allocator, nullptr);
  EXPECT_EQ(cache.pin(kDomain, sequence(0, 8)), 0);
  store(cache, allocator, sequence(0, 8));
  EXPECT_EQ(cache.pin(kDomain, sequence(0, 9)), 8);
  EXPECT_EQ(cache.pin(kDomain, sequence(0, 8)), 8);
  store(cache, allocator, sequence(0, 16));
  EXPECT_EQ(cache.clear().size(), 2u);
  cache.unpin(kDomain, sequence(0, 16));
  EXPECT_TRUE(cache.clear().empty());
  cache.unpin(kDomain, sequence(0, 8));
  expect_invalid("pinned", [&] { cache.unpin(kDomain, sequence(0, 8)); });
  EXPECT_EQ(cache.clear().size(), 2u);
  expect_invalid("pinned", [&] { cache.unpin(kDomain, sequence(0, 8)); });
}

TEST(PrefixCache, TheTreeGivesEverythingBack) {
  PageAllocator allocator(20, kPageSize);
  {
    PrefixCache cache(allocator, nullptr);
    store(cache, allocator, sequence(0, 16));
    store(cache, allocator, sequence(0, 8), {.salt = "x"});
    EXPECT_EQ(allocator.free_pages(), 13);
  }
  EXPECT_EQ(allocator.free_pages(), 19);
}

TEST(PrefixCache, MisuseIsAnError) {
  PageAllocator allocator(20, kPageSize);
  PrefixCache cache(allocator, nullptr);
  const std::vector<int64_t> free_page{3};
  expect_invalid("page 3 is free", [&] { cache.insert(kDomain, sequence(0, 4), free_page); });
  expect_invalid("1 pages given", [&] { cache.insert(kDomain, sequence(0, 8), free_page); });
  expect_invalid("max_tokens is -1", [&] { cache.match(kDomain, sequence(0, 8), -1); });
  expect_invalid("pages is -1", [&] { cache.evict(-1); });
  std::vector<int64_t> pages;
  ASSERT_TRUE(allocator.allocate(1, pages));
  expect_invalid("built without", [&] { cache.insert(kDomain, sequence(0, 4), pages, 1); });
  EXPECT_EQ(cache.stats().pages, 0);
}

class PrefixCacheWithState : public testing::Test {
 protected:
  static StateCacheSpec spec() {
    StateCacheSpec spec;
    spec.layers = 1;
    spec.conv_dim = 1;
    spec.conv_width = 2;
    spec.heads = spec.rows = spec.columns = 1;
    return spec;
  }
  int32_t match_state(const std::vector<int32_t>& tokens, int32_t expected_tokens) {
    const PrefixMatch match = cache.match(kDomain, tokens, static_cast<int32_t>(tokens.size()));
    EXPECT_EQ(match.tokens, expected_tokens);
    for (const int64_t page : match.pages) allocator.release(page);
    return match.state_slot;
  }

  PageAllocator allocator{20, kPageSize};
  std::unique_ptr<StatePool> states = make_state_pool(spec(), 8);
  PrefixCache cache{allocator, states.get()};
};

TEST_F(PrefixCacheWithState, AMatchEndsAtTheDeepestSnapshot) {
  store(cache, allocator, sequence(0, 12));
  EXPECT_EQ(match_state(sequence(0, 12), 0), -1) << "pages without a snapshot serve nothing";
  const int32_t at_8 = states->allocate().value();
  store(cache, allocator, sequence(0, 8), kDomain, at_8);
  EXPECT_EQ(cache.stats().pages, 3) << "the snapshot joined the pages that were there";
  EXPECT_EQ(match_state(sequence(0, 12), 8), at_8);
  EXPECT_EQ(match_state(sequence(0, 7), 0), -1);
  const int32_t at_4 = states->allocate().value();
  store(cache, allocator, sequence(0, 4), kDomain, at_4);
  EXPECT_EQ(match_state(sequence(0, 7), 4), at_4);
  EXPECT_EQ(match_state(sequence(0, 8), 8), at_8);
}

TEST_F(PrefixCacheWithState, SnapshotsAreEvictedByUseAndWithTheirPage) {
  const int32_t a = states->allocate().value();
  const int32_t b = states->allocate().value();
  store(cache, allocator, sequence(0, 4), kDomain, a);
  store(cache, allocator, sequence(50, 4), kDomain, b);
  EXPECT_EQ(cache.stats().snapshots, 2);
  EXPECT_EQ(match_state(sequence(0, 4), 4), a);
  EXPECT_TRUE(cache.evict_state());
  EXPECT_EQ(match_state(sequence(50, 4), 0), -1);
  EXPECT_EQ(match_state(sequence(0, 4), 4), a);
  EXPECT_EQ(states->free_slots(), 6);
  EXPECT_EQ(cache.clear().size(), 2u);
  EXPECT_EQ(states->free_slots(), 7);
  EXPECT_FALSE(cache.evict_state());
  EXPECT_EQ(cache.stats().snapshots, 0);
}

TEST_F(PrefixCacheWithState, ASecondSnapshotOfTheSamePrefixGoesBack) {
  const int32_t first = states->allocate().value();
  const int32_t second = states->allocate().value();
  store(cache, allocator, sequence(0, 4), kDomain, first);
  store(cache, allocator, sequence(0, 4), kDomain, second);
  EXPECT_EQ(states->free_slots(), 6);
  EXPECT_EQ(match_state(sequence(0, 4), 4), first);
}

TEST_F(PrefixCacheWithState, APinKeepsTheSnapshot) {
  const int32_t slot = states->allocate().value();
  store(cache, allocator, sequence(0, 4), kDomain, slot);
  store(cache, allocator, sequence(0, 8));
  EXPECT_EQ(cache.pin(kDomain, sequence(0, 8)), 4);
  EXPECT_FALSE(cache.evict_state());
  EXPECT_EQ(cache.clear().size(), 1u);
  EXPECT_EQ(match_state(sequence(0, 8), 4), slot);
  cache.unpin(kDomain, sequence(0, 8));
  EXPECT_TRUE(cache.evict_state());
}

TEST_F(PrefixCacheWithState, SnapshotsBelongAtPageEnds) {
  std::vector<int64_t> pages;
  ASSERT_TRUE(allocator.allocate(1, pages));
  const int32_t slot = states->allocate().value();
  expect_invalid("5 tokens", [&] { cache.insert(kDomain, sequence(0, 5), pages, slot); });
  expect_invalid("0 tokens", [&] { cache.insert(kDomain, {}, {}, slot); });
  states->release(slot);  // the caller still owns it
}

// The cache would release these at its end: a slot that the caller does not own, or one slot twice.
TEST_F(PrefixCacheWithState, SnapshotsAreOwnedAndGivenOnce) {
  std::vector<int64_t> pages;
  ASSERT_TRUE(allocator.allocate(2, pages));
  const int32_t slot = states->allocate().value();
  for (const int32_t nobodys : {99, 8, slot + 1, 0}) {
    expect_invalid("state_slot is " + std::to_string(nobodys) + ", must be in use in [1, 8)",
                   [&] { cache.insert(kDomain, sequence(0, 4), pages, nobodys); });
  }
  EXPECT_EQ(cache.stats().pages, 0) << "something changed hands";
  cache.insert(kDomain, sequence(0, 4), pages, slot);
  for (const int32_t length : {4, 8}) {  // the page that has it, and another one
    expect_invalid("state_slot is " + std::to_string(slot) + ", which the cache has",
                   [&] { cache.insert(kDomain, sequence(0, length), pages, slot); });
  }
  EXPECT_EQ(cache.stats().pages, 1);
  EXPECT_EQ(match_state(sequence(0, 8), 4), slot);
  ASSERT_TRUE(cache.evict_state());
  ASSERT_EQ(states->allocate(), slot);
  cache.insert(kDomain, sequence(0, 8), pages, slot);  // the caller owns it again and may give it
  EXPECT_EQ(match_state(sequence(0, 8), 8), slot);
}

// Evicting one page of a large tree must not cost a walk over the tree. Measured in processor time,
// which other programs hardly affect.
TEST(PrefixCache, EvictionScalesWithWhatItEvicts) {
  const auto seconds_per_page = [](int64_t leaves) {
    PageAllocator allocator(leaves + 1, kPageSize);
    PrefixCache cache(allocator, nullptr);
    for (int32_t i = 0; i < leaves; ++i) store(cache, allocator, sequence(i * kPageSize, 4));
    const std::clock_t start = std::clock();
    for (int i = 0; i < 200; ++i) EXPECT_EQ(cache.evict(1).size(), 1u);
    return static_cast<double>(std::max<std::clock_t>(std::clock() - start, 1)) / CLOCKS_PER_SEC /
           200;
  };
  double small = 1, large = 1;
  for (int i = 0; i < 3; ++i) {
    small = std::min(small, seconds_per_page(400));
    large = std::min(large, seconds_per_page(40000));
  }
  EXPECT_LT(large, 20 * small) << "100 times the leaves";
}

}  // namespace
}  // namespace fovea
