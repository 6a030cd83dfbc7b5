// SPDX-License-Identifier: Apache-2.0
// Pages and snapshots of a prefix cache that the caller has released by mistake, and spans without
// an address.
#include <gtest/gtest.h>

#include <cstdint>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "fovea/prefix_cache.h"
#include "support/expect_error.h"

namespace fovea {
namespace {

using test::expect_invalid;

constexpr int32_t kPageSize = 4;
const PrefixDomain kDomain{.model = "m"};

std::vector<int32_t> sequence(int32_t first, int32_t length) {
  std::vector<int32_t> tokens(static_cast<size_t>(length));
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

// Stores a prefix. Afterwards only the tree owns the pages. Returns them.
std::vector<int64_t> store(PrefixCache& cache, PageAllocator& allocator,
                           const std::vector<int32_t>& tokens, int32_t state_slot = -1) {
  std::vector<int64_t> pages;
  EXPECT_TRUE(allocator.allocate(static_cast<int64_t>(tokens.size()) / kPageSize, pages));
  cache.insert(kDomain, tokens, pages, state_slot);
  for (const int64_t page : pages) allocator.release(page);
  return pages;
}

// A page that was released once too often has no owner: the destructor does not release it.
TEST(PrefixMisuse, EndsWhereAPageWasReleasedTooOften) {
  PageAllocator allocator(16, kPageSize);
  std::vector<int64_t> pages;
  {
    PrefixCache cache(allocator, nullptr);
    pages = store(cache, allocator, sequence(0, 4 * kPageSize));
    for (const size_t wrong : {1, 3}) allocator.release(pages[wrong]);
  }
  EXPECT_EQ(allocator.free_pages(), 15);
}

TEST(PrefixMisuse, EvictionNamesAPageThatWasReleasedTooOften) {
  PageAllocator allocator(16, kPageSize);
  PrefixCache cache(allocator, nullptr);
  const std::vector<int64_t> pages = store(cache, allocator, sequence(0, 3 * kPageSize));
  allocator.release(pages[1]);
  EXPECT_EQ(cache.evict(3), std::vector<int64_t>{pages[2]});  // freed pages are not lost
  expect_invalid("page " + std::to_string(pages[1]) + " of the prefix cache is free",
                 [&] { cache.clear(); });
  EXPECT_EQ(cache.clear(), std::vector<int64_t>{pages[0]});
  EXPECT_EQ(cache.stats().pages, 0);
  EXPECT_EQ(allocator.free_pages(), 15);
}

TEST(PrefixMisuse, EndsWhereASnapshotWasReleased) {
  PageAllocator allocator(16, kPageSize);
  const auto states =
      make_state_pool({.layers = 1, .conv_width = 1, .heads = 1, .rows = 1, .columns = 1}, 3);
  {
    PrefixCache cache(allocator, states.get());
    const int32_t slot = *states->allocate();
    store(cache, allocator, sequence(0, kPageSize), slot);
    states->release(slot);
  }
  EXPECT_EQ(states->free_slots(), 2);
}

TEST(PrefixMisuse, SpansWithoutAnAddressAreNamed) {
  PageAllocator allocator(16, kPageSize);
  PrefixCache cache(allocator, nullptr);
  const std::span<const int32_t> tokens(static_cast<const int32_t*>(nullptr), 8);
  expect_invalid("tokens is null, of 8 entries", [&] { cache.match(kDomain, tokens, 8); });
  expect_invalid("tokens is null, of 8 entries", [&] { cache.insert(kDomain, tokens, {}); });
  expect_invalid("tokens is null, of 8 entries", [&] { cache.pin(kDomain, tokens); });
  expect_invalid("tokens is null, of 8 entries", [&] { cache.unpin(kDomain, tokens); });
  expect_invalid("pages is null, of 2 entries", [&] {
    cache.insert(kDomain, sequence(0, 8), {static_cast<const int64_t*>(nullptr), 2});
  });
}

}  // namespace
}  // namespace fovea
