// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "fovea/kv_cache.h"
#include "support/expect_error.h"

namespace fovea {
namespace {

using test::expect_invalid;

std::vector<int32_t> narrow(const std::vector<int64_t>& slots) {
  return {slots.begin(), slots.end()};
}

TEST(PageAllocator, ExtendFillsTheTailThenWholePages) {
  for (const int32_t page_size : {1, 3, 16}) {
    PageAllocator allocator(40, page_size);
    std::vector<int64_t> slots;
    int32_t length = 0;
    for (const int32_t next : {0, 1, 1, 2, 5, 15, 16, 17, 33, 34}) {
      ASSERT_TRUE(allocator.extend(length, next, length > 0 ? slots.back() : -1, slots));
      length = next;
      ASSERT_EQ(slots.size(), static_cast<size_t>(length));
      EXPECT_EQ(allocator.pages() - 1 - allocator.free_pages(),
                (length + page_size - 1) / page_size);
    }
    for (int32_t i = 0; i < length; ++i) {
      EXPECT_GE(slots[i], page_size) << "page 0 was handed out";
      EXPECT_EQ(slots[i] % page_size, i % page_size);
      if (i % page_size > 0) {
        EXPECT_EQ(slots[i], slots[i - 1] + 1);
      }
    }
    EXPECT_EQ((std::set<int64_t>(slots.begin(), slots.end()).size()), slots.size());
    allocator.release_slots(narrow(slots));
    EXPECT_EQ(allocator.free_pages(), 39);
  }
}

TEST(PageAllocator, ExhaustionTakesNothing) {
  PageAllocator allocator(4, 4);
  std::vector<int64_t> slots;
  ASSERT_TRUE(allocator.extend(0, 6, -1, slots));
  EXPECT_FALSE(allocator.extend(6, 13, slots.back(), slots));
  EXPECT_EQ(slots.size(), 6u);
  EXPECT_EQ(allocator.free_pages(), 1);
  EXPECT_TRUE(allocator.extend(6, 12, slots.back(), slots));
  EXPECT_EQ(slots.size(), 12u);
  std::vector<int64_t> pages;
  EXPECT_FALSE(allocator.allocate(1, pages));
  EXPECT_TRUE(allocator.allocate(0, pages));
  EXPECT_TRUE(pages.empty());
  // A tail with room needs no page.
  allocator.truncate(narrow(slots), 9);
  EXPECT_EQ(allocator.free_pages(), 0);
  slots.resize(9);
  EXPECT_TRUE(allocator.extend(9, 12, slots.back(), slots));
}

TEST(PageAllocator, TruncateReturnsWholePagesOnly) {
  for (const int32_t page_size : {1, 4}) {
    for (int32_t length = 0; length <= 13; ++length) {
      for (int32_t keep = 0; keep <= length; ++keep) {
        PageAllocator allocator(20, page_size);
        std::vector<int64_t> slots;
        ASSERT_TRUE(allocator.extend(0, length, -1, slots));
        allocator.truncate(narrow(slots), keep);
        slots.resize(static_cast<size_t>(keep));
        const int32_t used = (keep + page_size - 1) / page_size;
        ASSERT_EQ(allocator.free_pages(), 19 - used) << length << " to " << keep;
        ASSERT_TRUE(allocator.extend(keep, keep + 5, keep > 0 ? slots.back() : -1, slots));
        EXPECT_EQ((std::set<int64_t>(slots.begin(), slots.end()).size()), slots.size());
        allocator.release_slots(narrow(slots));
        EXPECT_EQ(allocator.free_pages(), 19);
      }
    }
  }
}

TEST(PageAllocator, SharedTailCannotBeWritten) {
  PageAllocator allocator(8, 4);
  std::vector<int64_t> slots;
  ASSERT_TRUE(allocator.extend(0, 6, -1, slots));
  const int64_t tail = slots.back() / 4;
  allocator.retain(tail);
  expect_invalid("page " + std::to_string(tail) + " has 2 owners",
                 [&] { allocator.extend(6, 7, slots.back(), slots); });
  allocator.release(tail);
  EXPECT_TRUE(allocator.extend(6, 8, slots.back(), slots));
  // A full page may be shared: growing does not write it.
  allocator.retain(tail);
  EXPECT_TRUE(allocator.extend(8, 9, slots.back(), slots));
}

TEST(PageAllocator, MisuseNamesThePage) {
  PageAllocator allocator(8, 4);
  std::vector<int64_t> pages;
  ASSERT_TRUE(allocator.allocate(2, pages));
  allocator.release(pages[0]);
  const std::string page = "page " + std::to_string(pages[0]);
  expect_invalid(page + " is free", [&] { allocator.release(pages[0]); });
  expect_invalid(page + " is free", [&] { allocator.retain(pages[0]); });
  expect_invalid("page 0 is outside [1, 8)", [&] { allocator.release(0); });
  expect_invalid("page 8 is outside [1, 8)", [&] { allocator.release(8); });
  EXPECT_EQ(allocator.references(0), 0);
  expect_invalid("page 8", [&] { (void)allocator.references(8); });
  expect_invalid("page -1", [&] { (void)allocator.references(-1); });
  expect_invalid("page 0", [&] { allocator.release_slots(std::vector<int32_t>{0, 1}); });
  std::vector<int64_t> slots;
  expect_invalid(page + " is free", [&] { allocator.extend(1, 2, pages[0] * 4, slots); });
  expect_invalid("last_slot", [&] { allocator.extend(2, 3, pages[1] * 4, slots); });
  expect_invalid("that of token 1", [&] { allocator.extend(2, 3, pages[1] * 4, slots); });
  expect_invalid("from 3 to 2", [&] { allocator.extend(3, 2, 0, slots); });
  expect_invalid("from -4 to 2", [&] { allocator.extend(-4, 2, 0, slots); });
  expect_invalid("count is -1", [&] { allocator.allocate(-1, pages); });
  expect_invalid("truncate 1 tokens to -1",
                 [&] { allocator.truncate(std::vector<int32_t>{4}, -1); });
  expect_invalid("truncate 1 tokens to 2", [&] { allocator.truncate(std::vector<int32_t>{4}, 2); });
  EXPECT_EQ(allocator.free_pages(), 6);
  expect_invalid("pages is 1", [] { PageAllocator(1, 4); });
  expect_invalid("page_size is 0", [] { PageAllocator(4, 0); });
  expect_invalid("pages is 536870912", [] { PageAllocator(int64_t{1} << 29, 4); });
}

TEST(PageAllocator, TwoPagesAreTheFewestAndSlotsAreInt32) {
  constexpr int32_t kHalf = std::numeric_limits<int32_t>::max() / 2;
  EXPECT_EQ(PageAllocator(2, kHalf).free_pages(), 1);
  expect_invalid("pages is 3", [] { PageAllocator(3, kHalf); });
}

TEST(PageAllocator, ReleasesThePagesOfTokensThatBeginInsideOne) {
  PageAllocator allocator(5, 4);
  std::vector<int64_t> slots;
  ASSERT_TRUE(allocator.extend(0, 12, -1, slots));
  const std::vector<int32_t> tokens = narrow(slots);
  allocator.release_slots(std::span(tokens).subspan(6));
  EXPECT_EQ(allocator.free_pages(), 1 + 2);
  EXPECT_EQ(allocator.references(slots[0] / 4), 1);
}

TEST(RequestTable, RowsAreZeroUntilWrittenAndAgainAfterRelease) {
  RequestTable table(4, 10);
  EXPECT_EQ(table.row_stride(), 10);
  EXPECT_EQ(table.available(), 3);
  std::set<int32_t> rows;
  for (int i = 0; i < 3; ++i) rows.insert(table.allocate().value());
  EXPECT_EQ(rows, (std::set<int32_t>{1, 2, 3}));
  EXPECT_FALSE(table.allocate());
  for (const int32_t row : rows) {
    for (int32_t& slot : table.row(row)) slot = 100 * row;
  }
  EXPECT_EQ(table.data()[2 * 10 + 9], 200);
  EXPECT_EQ(table.row(0)[9], 0);
  table.release(2);
  EXPECT_EQ(table.row(2)[9], 0);
  EXPECT_EQ(table.row(3)[0], 300);
  EXPECT_EQ(table.allocate(), 2);
}

TEST(RequestTable, MisuseNamesTheRow) {
  RequestTable table(3, 4);
  const int32_t row = table.allocate().value();
  table.release(row);
  expect_invalid("request row " + std::to_string(row), [&] { table.release(row); });
  for (const int32_t wrong : {-1, 0, 3}) {
    expect_invalid("request row " + std::to_string(wrong), [&] { table.release(wrong); });
  }
  expect_invalid("request row is 3", [&] { table.row(3); });
  expect_invalid("request row is 3", [&] { table.mark_changed(3, 0); });
  expect_invalid("request row is -1", [&] { table.take_changed(-1); });
  expect_invalid("first is -1", [&] { table.mark_changed(1, -1); });
  expect_invalid("first is 5", [&] { table.mark_changed(1, 5); });
  expect_invalid("max_requests is 1", [] { RequestTable(1, 4); });
  expect_invalid("max_context is 0", [] { RequestTable(2, 0); });
  EXPECT_EQ(RequestTable(2, 1).row(1).size(), 1u);
}

TEST(RequestTable, SaysWhatWasWrittenSinceItWasAsked) {
  RequestTable table(3, 8);
  const int32_t row = table.allocate().value(), other = table.allocate().value();
  EXPECT_EQ(table.take_changed(row), 8) << "nothing was";
  for (const int32_t first : {5, 3, 6, 8}) table.mark_changed(row, first);
  EXPECT_EQ(table.take_changed(row), 3);
  EXPECT_EQ(table.take_changed(row), 8);
  table.release(row);
  EXPECT_EQ(table.take_changed(row), 0) << "zeros were";
  EXPECT_EQ(table.take_changed(other), 8);
}

}  // namespace
}  // namespace fovea
