// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "fovea/kv_cache.h"
#include "support/expect_error.h"

namespace fovea {
namespace {

using test::expect_invalid;

KvCacheSpec window_spec(int32_t page_size, int32_t window) {
  KvCacheSpec spec;
  spec.layers = 2;
  spec.kv_heads = 1;
  spec.head_dim = 8;
  spec.head_dim_v = 8;
  spec.page_size = page_size;
  spec.window = window;
  return spec;
}

TEST(WindowKvPool, StartsWithTheDummyPageOnly) {
  const auto pool = make_window_kv_pool(window_spec(4, 8), 5, 40);
  EXPECT_EQ(pool->free_pages(), 4);
  EXPECT_EQ(pool->layer(0).slots, 20);
  for (int64_t slot = 0; slot < 4; ++slot) EXPECT_EQ(pool->slot_map()[slot], slot);
  for (int64_t slot = 4; slot < 40; ++slot) EXPECT_EQ(pool->slot_map()[slot], -1);
}

TEST(WindowKvPool, MapKeepsThePlaceInThePage) {
  const auto pool = make_window_kv_pool(window_spec(4, 8), 5, 40);
  ASSERT_TRUE(pool->map(std::vector<int64_t>{30, 31, 12, 13}));
  EXPECT_EQ(pool->free_pages(), 2);
  const int64_t page = pool->slot_map()[30] / 4;
  EXPECT_GT(page, 0);
  EXPECT_EQ(pool->slot_map()[30], page * 4 + 2);
  EXPECT_EQ(pool->slot_map()[31], page * 4 + 3);
  // The rest of a page joins it, no matter when it is mapped.
  ASSERT_TRUE(pool->map(std::vector<int64_t>{14, 28, 28}));
  EXPECT_EQ(pool->slot_map()[28], page * 4);
  EXPECT_EQ(pool->free_pages(), 2);
}

TEST(WindowKvPool, MapAndUnmapRepeatWithoutCountingTwice) {
  const auto pool = make_window_kv_pool(window_spec(4, 8), 5, 40);
  const std::vector<int64_t> slots{8, 9, 10};
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(pool->map(slots));
  EXPECT_EQ(pool->free_pages(), 3);
  const std::vector<int32_t> row{8, 9};
  for (int i = 0; i < 3; ++i) pool->unmap(row);
  EXPECT_EQ(pool->free_pages(), 3) << "slot 10 still lives there";
  EXPECT_GE(pool->slot_map()[10], 0);
  for (int i = 0; i < 3; ++i) pool->unmap(slots);
  EXPECT_EQ(pool->free_pages(), 4);
  pool->unmap_pages(std::vector<int64_t>{2, 3});
  EXPECT_EQ(pool->free_pages(), 4);
}

TEST(WindowKvPool, FullPoolTakesNothing) {
  const auto pool = make_window_kv_pool(window_spec(4, 8), 3, 40);
  ASSERT_TRUE(pool->map(std::vector<int64_t>{4}));
  const std::vector<int64_t> before(pool->slot_map().begin(), pool->slot_map().end());
  EXPECT_FALSE(pool->map(std::vector<int64_t>{5, 6, 8, 9, 12}));
  EXPECT_EQ(pool->free_pages(), 1);
  EXPECT_TRUE(std::ranges::equal(before, pool->slot_map()));
  EXPECT_TRUE(pool->map(std::vector<int64_t>{5, 6, 8, 9}));
  EXPECT_EQ(pool->free_pages(), 0);
}

TEST(WindowKvPool, MisuseIsAnError) {
  const auto pool = make_window_kv_pool(window_spec(4, 8), 3, 40);
  expect_invalid("slot 3", [&] { pool->map(std::vector<int64_t>{3}); });
  expect_invalid("slot 40", [&] { pool->map(std::vector<int64_t>{4, 40}); });
  EXPECT_EQ(pool->free_pages(), 2);
  expect_invalid("slot -1", [&] { pool->unmap(std::vector<int32_t>{-1}); });
  expect_invalid("slot 40", [&] { pool->unmap_pages(std::vector<int64_t>{10}); });
  expect_invalid("window is 0", [] { make_window_kv_pool(window_spec(4, 0), 3, 40); });
  expect_invalid("pages is 1", [] { make_window_kv_pool(window_spec(4, 8), 1, 40); });
  expect_invalid("page_size is 0", [] { make_window_kv_pool(window_spec(0, 8), 3, 40); });
  EXPECT_NO_THROW(make_window_kv_pool(window_spec(4, 8), 2, 8));
  for (const int32_t layer : {-1, pool->spec().layers})
    expect_invalid("layer is " + std::to_string(layer), [&] { (void)pool->layer(layer); });
  for (const int64_t slots : {int64_t{4}, int64_t{42}, int64_t{1} << 40}) {
    expect_invalid("full_slots is " + std::to_string(slots),
                   [&] { make_window_kv_pool(window_spec(4, 8), 3, slots); });
  }
}

// A request that unmaps the pages outside its window holds at most ceil((window - 1 + new) /
// page_size) + 1 pages.
TEST(WindowKvPool, SlidingRequestStaysWithinItsBound) {
  std::mt19937 random(7);
  for (const int32_t page_size : {1, 3, 16}) {
    for (const int32_t window : {1, 2, 15, 16, 17, 40}) {
      PageAllocator allocator(400, page_size);
      const auto pool =
          make_window_kv_pool(window_spec(page_size, window), 200, int64_t{400} * page_size);
      std::vector<int64_t> slots;
      std::vector<int32_t> row;
      while (row.size() < 350) {
        const auto length = static_cast<int32_t>(row.size());
        const auto added = static_cast<int32_t>(1 + random() % 20);
        const size_t first_new = slots.size();
        ASSERT_TRUE(allocator.extend(length, length + added, length ? slots.back() : -1, slots));
        row.assign(slots.begin(), slots.end());
        ASSERT_TRUE(pool->map(std::span(slots).subspan(first_new)));
        const int32_t bound = (window - 1 + added + page_size - 1) / page_size + 1;
        EXPECT_LE(pool->pages() - 1 - pool->free_pages(), bound)
            << "page_size " << page_size << " window " << window << " at " << length;
        // The first new token sees window - 1 tokens before it.
        for (int32_t i = std::max(0, length - window + 1); i < length + added; ++i) {
          ASSERT_EQ(pool->slot_map()[row[i]] % page_size, i % page_size);
        }
        const int32_t left = std::max(0, length + added - window + 1);
        pool->unmap(std::span<const int32_t>(row).first(left));
      }
      pool->unmap(row);
      EXPECT_EQ(pool->free_pages(), 199);
    }
  }
}

TEST(WindowKvPool, MatchesANaiveModel) {
  constexpr int32_t kPageSize = 4;
  constexpr int32_t kFullPages = 20;
  const auto pool = make_window_kv_pool(window_spec(kPageSize, 8), 8, kFullPages * kPageSize);
  std::vector<bool> mapped(kFullPages * kPageSize);
  const auto pages_needed = [&](const std::vector<bool>& slots) {
    int64_t pages = 0;
    for (int32_t page = 1; page < kFullPages; ++page) {
      pages += std::any_of(slots.begin() + page * kPageSize, slots.begin() + (page + 1) * kPageSize,
                           [](bool slot) { return slot; });
    }
    return pages;
  };
  std::mt19937 random(11);
  int refused = 0;
  for (int step = 0; step < 20000; ++step) {
    std::vector<int64_t> slots(random() % 9);
    auto next = static_cast<int64_t>(kPageSize + random() % (kFullPages - 1) * kPageSize);
    for (int64_t& slot : slots) {
      slot = next;
      next = random() % 4 ? std::min<int64_t>(next + 1, kFullPages * kPageSize - 1)
                          : kPageSize + random() % ((kFullPages - 1) * kPageSize);
    }
    if (random() % 2) {
      std::vector<bool> wanted = mapped;
      for (const int64_t slot : slots) wanted[slot] = true;
      const bool fits = pages_needed(wanted) <= 7;
      ASSERT_EQ(pool->map(slots), fits);
      if (fits) mapped = wanted;
      refused += !fits;
    } else {
      pool->unmap(slots);
      for (const int64_t slot : slots) mapped[slot] = false;
    }
    ASSERT_EQ(pool->free_pages(), 7 - pages_needed(mapped));
    std::vector<int64_t> owner(8, -1);
    for (int64_t slot = kPageSize; slot < kFullPages * kPageSize; ++slot) {
      const int64_t place = pool->slot_map()[slot];
      ASSERT_EQ(place >= 0, mapped[slot]);
      if (place < 0) continue;
      ASSERT_EQ(place % kPageSize, slot % kPageSize);
      int64_t& page_owner = owner[place / kPageSize];
      ASSERT_TRUE(page_owner == -1 || page_owner == slot / kPageSize) << "two owners";
      page_owner = slot / kPageSize;
    }
  }
  EXPECT_GT(refused, 100);
}

TEST(UsableWindowPrefix, EndsWhereTheWindowIsComplete) {
  const std::vector<int64_t> pages{3, 5, 2, 7};
  const auto slots_of = [&](int32_t from, int32_t to) {
    std::vector<int64_t> slots;
    for (int32_t i = from; i < to; ++i) slots.push_back(pages[i / 4] * 4 + i % 4);
    return slots;
  };
  const auto usable = [&](int32_t window, std::vector<std::pair<int32_t, int32_t>> holes) {
    const auto pool = make_window_kv_pool(window_spec(4, window), 10, 40);
    EXPECT_TRUE(pool->map(slots_of(0, 16)));
    for (const auto& [from, to] : holes) pool->unmap(slots_of(from, to));
    return usable_window_prefix(*pool, pages);
  };
  EXPECT_EQ(usable(6, {}), 16);
  EXPECT_EQ(usable(6, {{0, 11}}), 16) << "5 tokens before position 16 remain";
  EXPECT_EQ(usable(6, {{0, 12}}), 0);
  EXPECT_EQ(usable(6, {{15, 16}}), 12);
  EXPECT_EQ(usable(6, {{2, 3}, {15, 16}}), 12);
  EXPECT_EQ(usable(6, {{7, 8}, {15, 16}}), 4);
  EXPECT_EQ(usable(100, {{0, 1}}), 0) << "a window longer than the prefix needs all of it";
  EXPECT_EQ(usable(1, {{0, 16}}), 16) << "a token that sees itself only needs nothing";
}

TEST(UsableWindowPrefix, NamesAPageThatTheFullPoolDoesNotHave) {
  const auto pool = make_window_kv_pool(window_spec(4, 6), 10, 40);
  for (const int64_t page : {-1, 10, 77}) {
    const std::vector<int64_t> pages = {3, page};
    expect_invalid(std::to_string(page) + " is outside [0, 10)",
                   [&] { (void)usable_window_prefix(*pool, pages); });
  }
}

}  // namespace
}  // namespace fovea
