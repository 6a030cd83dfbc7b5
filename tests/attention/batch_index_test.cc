// SPDX-License-Identifier: Apache-2.0
#include "fovea/batch_index.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "fovea/error.h"
#include "support/expect_error.h"

namespace fovea {
namespace {

using test::expect_invalid;

constexpr int32_t kContext = 70;
constexpr int32_t kWild = -123456;

// Requests with pages in random order. Table entries that must not be read are wild.
struct Table {
  int32_t page_size = 1;
  int64_t pages = 0;
  std::vector<int32_t> slots, rows, lens, first_tokens;
  std::vector<std::vector<int32_t>> pages_of;  // [request]
  std::vector<int32_t> page_entries;           // the same tokens as `slots`, by pages
  bool by_pages = false;                       // selects the table
  std::vector<int64_t> slot_map;               // window pools; else empty

  TokenSlots tokens() const {
    TokenSlots tokens;
    tokens.table = {(by_pages ? page_entries : slots).data(), kContext, by_pages ? page_size : 1,
                    static_cast<int32_t>(slots.size() / kContext)};
    tokens.rows = rows;
    tokens.lens = lens;
    tokens.first_tokens = first_tokens;
    tokens.slot_map = slot_map;
    tokens.page_size = page_size;
    tokens.pages = pages;
    tokens.check = PageCheck::every_slot;
    return tokens;
  }
};

Table make_table(int32_t page_size, const std::vector<int32_t>& lens, uint32_t seed) {
  Table table;
  table.page_size = page_size;
  table.lens = lens;
  std::mt19937 random(seed);
  int64_t owned = 0;
  for (const int32_t len : lens) owned += (len + page_size - 1) / page_size;
  table.pages = owned + 4;
  std::vector<int32_t> free(static_cast<size_t>(table.pages - 1));
  std::iota(free.begin(), free.end(), 1);
  std::shuffle(free.begin(), free.end(), random);
  const auto requests = static_cast<int32_t>(lens.size());
  table.rows.resize(lens.size());
  std::iota(table.rows.begin(), table.rows.end(), 1);
  std::shuffle(table.rows.begin(), table.rows.end(), random);
  table.slots.assign(static_cast<size_t>((requests + 1) * kContext), kWild);
  table.page_entries = table.slots;
  for (int32_t i = 0; i < requests; ++i) {
    table.pages_of.emplace_back();
    for (int32_t token = 0; token < lens[i]; ++token) {
      if (token % page_size == 0) {
        table.pages_of.back().push_back(free.back());
        free.pop_back();
      }
      table.slots[table.rows[i] * kContext + token] =
          table.pages_of.back().back() * page_size + token % page_size;
    }
    std::ranges::copy(table.pages_of.back(), table.page_entries.begin() + table.rows[i] * kContext);
  }
  return table;
}

Table any_table() {
  const int32_t page_size = *rc::gen::element(1, 2, 3, 16, 64);
  const auto lens = *rc::gen::container<std::vector<int32_t>>(*rc::gen::inRange<size_t>(0, 6),
                                                              rc::gen::inRange(0, kContext + 1));
  Table table = make_table(page_size, lens, *rc::gen::arbitrary<uint32_t>());
  table.by_pages = *rc::gen::arbitrary<bool>();
  return table;
}

void build_any_page_table(const TokenSlots& tokens) {
  std::vector<int32_t> table(static_cast<size_t>(tokens.requests()) * kContext);
  build_page_table(tokens, kContext, table);
}

void expect_page_table_error(std::initializer_list<std::string_view> parts,
                             const TokenSlots& tokens) {
  test::expect_error(ErrorCode::invalid_argument, parts, [&] { build_any_page_table(tokens); });
}

TEST(BatchIndex, PageTableHoldsThePagesAndZeros) {
  RC_ASSERT(rc::check([] {
    const Table table = any_table();
    const int64_t stride = kContext + *rc::gen::inRange(0, 3);
    std::vector<int32_t> out(table.lens.size() * static_cast<size_t>(stride), kWild);
    build_page_table(table.tokens(), stride, out);
    for (size_t i = 0; i < table.lens.size(); ++i) {
      for (size_t column = 0; column < static_cast<size_t>(stride); ++column) {
        const std::vector<int32_t>& pages = table.pages_of[i];
        const int32_t want = column < pages.size() ? pages[column] : 0;
        RC_ASSERT(out[i * static_cast<size_t>(stride) + column] == want);
      }
    }
  }));
}

TEST(BatchIndex, PageIndicesConcatenateThePages) {
  RC_ASSERT(rc::check([] {
    const Table table = any_table();
    std::vector<int32_t> indptr(table.lens.size() + 1, kWild), last(table.lens.size(), kWild);
    std::vector<int32_t> indices(static_cast<size_t>(table.pages), kWild), want;
    build_page_indices(table.tokens(), {indptr, indices, last});
    RC_ASSERT(indptr[0] == 0);
    for (size_t i = 0; i < table.lens.size(); ++i) {
      want.insert(want.end(), table.pages_of[i].begin(), table.pages_of[i].end());
      RC_ASSERT(indptr[i + 1] == static_cast<int32_t>(want.size()));
      const int32_t rest = table.lens[i] % table.page_size;
      RC_ASSERT(last[i] == (table.lens[i] == 0 ? 1 : rest == 0 ? table.page_size : rest));
    }
    RC_ASSERT(std::equal(want.begin(), want.end(), indices.begin()));
  }));
}

TEST(BatchIndex, SlotIndicesStartAtTheFirstToken) {
  RC_ASSERT(rc::check([] {
    Table table = any_table();
    for (const int32_t len : table.lens) {
      table.first_tokens.push_back(*rc::gen::inRange(0, len + 1));
    }
    std::vector<int32_t> indptr(table.lens.size() + 1, kWild), want;
    std::vector<int32_t> indices(static_cast<size_t>(table.pages * table.page_size), kWild);
    build_slot_indices(table.tokens(), indptr, indices);
    for (size_t i = 0; i < table.lens.size(); ++i) {
      RC_ASSERT(indptr[i] == static_cast<int32_t>(want.size()));
      for (int32_t token = table.first_tokens[i]; token < table.lens[i]; ++token) {
        want.push_back(table.slots[table.rows[i] * kContext + token]);
      }
    }
    RC_ASSERT(indptr.back() == static_cast<int32_t>(want.size()));
    RC_ASSERT(std::equal(want.begin(), want.end(), indices.begin()));
  }));
}

// A window pool keeps the pages of the window in slots of its own.
TEST(BatchIndex, WindowPoolsTranslateSlotsAndForgetTheRest) {
  RC_ASSERT(rc::check([] {
    Table table = any_table();
    const Table full = table;
    table.slot_map.assign(static_cast<size_t>(full.pages * full.page_size), -1);
    const int64_t shift = *rc::gen::inRange(0, 5);
    for (size_t i = 0; i < table.lens.size(); ++i) {
      const int32_t first = *rc::gen::inRange(0, table.lens[i] + 1);
      table.first_tokens.push_back(first);
      for (int32_t token = first; token < table.lens[i]; ++token) {
        const int64_t slot = table.slots[table.rows[i] * kContext + token];
        table.slot_map[slot] = slot + shift * table.page_size;
      }
    }
    table.pages += shift;
    std::vector<int32_t> out(table.lens.size() * kContext, kWild);
    build_page_table(table.tokens(), kContext, out);
    for (size_t i = 0; i < table.lens.size(); ++i) {
      for (int32_t column = 0; column < static_cast<int32_t>(table.pages_of[i].size()); ++column) {
        const int32_t end = std::min((column + 1) * table.page_size, table.lens[i]);
        const bool seen = end > table.first_tokens[i];
        const int64_t want = seen ? table.pages_of[i][column] + shift : 0;
        RC_ASSERT(out[i * kContext + column] == want);
      }
    }
  }));
}

TEST(BatchIndex, IndptrSumsLengths) {
  const std::vector<int32_t> lens = {3, 0, 5, 1};
  std::vector<int32_t> indptr(5, kWild);
  build_indptr(lens, indptr);
  EXPECT_EQ(indptr, (std::vector<int32_t>{0, 3, 3, 8, 9}));
  build_indptr({}, std::span(indptr).first(1));
  EXPECT_EQ(indptr[0], 0);
  const std::vector<int32_t> huge(3, 1 << 30);
  expect_invalid("indices of the batch number 2147483648", [&] { build_indptr(huge, indptr); });
  const std::vector<int32_t> negative = {3, -1};
  expect_invalid("lens[1] is -1, must not be negative", [&] { build_indptr(negative, indptr); });
}

TEST(BatchIndex, AddressesAre64Bit) {
  // Row 40 of a table of 2^27 columns begins at 5 * 2^30 entries.
  constexpr int64_t kStride = int64_t{1} << 27;
  const std::vector<int32_t> row = {32, 33};
  const int32_t rows[] = {40}, lens[] = {2};
  TokenSlots tokens;
  tokens.table = {row.data() - 40 * kStride, kStride, 1, 41};
  tokens.rows = rows;
  tokens.lens = lens;
  tokens.page_size = 16;
  tokens.pages = 3;
  std::vector<int32_t> table(1);
  build_page_table(tokens, 1, table);
  EXPECT_EQ(table[0], 2);
}

TEST(BatchIndex, DummyRowsAreLegalAtAnyLength) {
  Table table = make_table(16, {40}, 1);
  std::fill(table.slots.begin(), table.slots.end(), 0);
  table.rows = {0};
  std::vector<int32_t> out(kContext, kWild);
  build_page_table(table.tokens(), kContext, out);
  EXPECT_EQ(out, std::vector<int32_t>(kContext, 0));
  std::fill(table.page_entries.begin(), table.page_entries.end(), 0);
  table.by_pages = true;
  build_page_table(table.tokens(), kContext, out);
  EXPECT_EQ(out, std::vector<int32_t>(kContext, 0));
}

// Check 6: every way in which a used entry can be wrong is an error that names it.
TEST(BatchIndex, UsedEntriesThatAreWrongAreNamed) {
  const std::vector<int32_t> lens = {40, 33};
  for (const int32_t wrong :
       {-1, std::numeric_limits<int32_t>::min(), std::numeric_limits<int32_t>::max()}) {
    for (const int32_t token : {0, 5, 15, 16, 32}) {
      Table table = make_table(16, lens, 3);
      table.slots[table.rows[1] * kContext + token] = wrong;
      expect_page_table_error(
          {"request 1, column " + std::to_string(token / 16), std::to_string(wrong)},
          table.tokens());
    }
  }
}

TEST(BatchIndex, PagesOutsideThePoolAreNamed) {
  Table table = make_table(16, {40}, 3);
  const auto pages = static_cast<int32_t>(table.pages);
  for (int32_t token = 16; token < 32; ++token) {
    table.slots[table.rows[0] * kContext + token] = pages * 16 + token - 16;
  }
  expect_page_table_error({"request 0, column 1", "pool of " + std::to_string(pages)},
                          table.tokens());
  table.by_pages = true;
  int32_t& entry = table.page_entries[table.rows[0] * kContext + 1];
  for (const int32_t wrong : {-1, INT32_MIN, pages, INT32_MAX}) {
    entry = wrong;
    expect_page_table_error({"request 0, column 1: page " + std::to_string(wrong) +
                             " is outside [0, " + std::to_string(pages) + ")"},
                            table.tokens());
  }
  entry = 0;
  expect_page_table_error({"token 31 has no page"}, table.tokens());
}

TEST(BatchIndex, LengthsBeyondTheOwnedPagesAreNamed) {
  for (const int32_t page_size : {1, 16}) {
    Table table = make_table(page_size, {32}, 3);
    int32_t* row = table.slots.data() + table.rows[0] * kContext;
    std::fill(row + 32, row + kContext, 0);
    table.lens = {33};
    expect_page_table_error({"token 32 has no page"}, table.tokens());
  }
}

// A small version of 300 tokens from slot 14 on, which straddle pages of 128.
TEST(BatchIndex, SlotsThatStraddlePagesAreRefused) {
  Table table = make_table(16, {30}, 3);
  int32_t* row = table.slots.data() + table.rows[0] * kContext;
  std::iota(row, row + 30, 14);
  for (const PageCheck check : {PageCheck::ends, PageCheck::every_slot}) {
    TokenSlots tokens = table.tokens();
    tokens.check = check;
    expect_page_table_error({"slot % 16 == token % 16"}, tokens);
  }
}

TEST(BatchIndex, OnlyTheFullCheckSeesInnerSlots) {
  Table table = make_table(16, {16}, 3);
  std::swap(table.slots[table.rows[0] * kContext + 3], table.slots[table.rows[0] * kContext + 4]);
  TokenSlots tokens = table.tokens();
  expect_page_table_error({"are not in one page of 16 slots"}, tokens);
  tokens.check = PageCheck::ends;
  EXPECT_NO_THROW(build_any_page_table(tokens));
}

TEST(BatchIndex, RequestsThatAreNoneAreNamed) {
  const Table table = make_table(16, {40, 20}, 3);
  const std::vector<int32_t> negative = {1, -1}, long_one = {71, 20};
  using Change = std::function<void(TokenSlots&)>;
  const std::vector<std::pair<std::string, Change>> changes = {
      {"page_size is 0, must be at least 1", [](auto& t) { t.page_size = 0; }},
      {"pages is -1, must be in [0, 134217727]", [](auto& t) { t.pages = -1; }},
      {"pages is 134217728, must be in [0, 134217727] with a page_size of 16: slots are 32-bit",
       [](auto& t) { t.pages = 1 << 27; }},
      {"table.entries is null", [](auto& t) { t.table.entries = nullptr; }},
      {"rows has 1 elements, lens has 2", [](auto& t) { t.rows = t.rows.first(1); }},
      {"first_tokens has 1 elements, lens has 2",
       [](auto& t) { t.first_tokens = t.rows.first(1); }},
      {"rows[1] is -1, must be in [0, 3), the rows of the table",
       [&](auto& t) { t.rows = negative; }},
      {"rows[0] is 71, must be in [0, 3)", [&](auto& t) { t.rows = long_one; }},
      {"table.rows is 0, must be positive", [](auto& t) { t.table.rows = 0; }},
      {"addresses exceed 63 bits",
       [](auto& t) { t.table.stride = std::numeric_limits<int64_t>::max(); }},
      {"check is PageCheck(9)", [](auto& t) { t.check = static_cast<PageCheck>(9); }},
      {"lens[1] is -1, must be in [0, 70], a row of the table",
       [&](auto& t) { t.lens = negative; }},
      {"lens[0] is 71, must be in [0, 70], a row of the table",
       [&](auto& t) { t.lens = long_one; }},
      {"first_tokens[1] is -1, must not be negative", [&](auto& t) { t.first_tokens = negative; }},
  };
  std::vector<int32_t> a(200), b(200), c(200);
  for (const auto& [words, change] : changes) {
    TokenSlots tokens = table.tokens();
    change(tokens);
    expect_invalid(words, [&] { build_page_table(tokens, 5, a); });
    expect_invalid(words, [&] { build_page_indices(tokens, {a, b, c}); });
    expect_invalid(words, [&] { build_slot_indices(tokens, a, b); });
  }
}

TEST(BatchIndex, SlotsOfPageZeroArePaddings) {
  Table table = make_table(16, {20}, 1);
  std::vector<int32_t> indptr(2), indices(20);
  table.slots[table.rows[0] * kContext + 19] = 3;
  expect_invalid("request 0, token 19: slot 3 is outside [16,",
                 [&] { build_slot_indices(table.tokens(), indptr, indices); });
}

TEST(BatchIndex, ShortBuffersAreRefused) {
  const Table table = make_table(16, {40, 20}, 3);
  expect_invalid("requests * table_stride overflows", [&] {
    build_page_table(table.tokens(), std::numeric_limits<int64_t>::max(), {});
  });
  expect_invalid("table is null, of 200 entries", [&] {
    build_page_table(table.tokens(), 5, {static_cast<int32_t*>(nullptr), 200});
  });
  std::vector<int32_t> small(4), large(64);
  expect_invalid("table holds 4 entries, needs 6",
                 [&] { build_page_table(table.tokens(), 3, small); });
  expect_invalid("3 pages exceed the table's 2 columns",
                 [&] { build_page_table(table.tokens(), 2, large); });
  expect_invalid("indices holds 4 entries, needs 5", [&] {
    build_page_indices(table.tokens(), {large, small, large});
  });
  expect_invalid("indices holds 4 entries, needs 40",
                 [&] { build_slot_indices(table.tokens(), large, small); });
  const std::span<int32_t> two = std::span(small).first(2), one = std::span(small).first(1);
  const TokenSlots tokens = table.tokens();
  expect_invalid("indptr holds 2 entries, needs 3", [&] {
    build_page_indices(tokens, {two, large, large});
  });
  expect_invalid("last_page_lens holds 1 entries, needs 2", [&] {
    build_page_indices(tokens, {large, large, one});
  });
  expect_invalid("indptr holds 2 entries, needs 3",
                 [&] { build_slot_indices(tokens, two, large); });
  expect_invalid("indptr holds 2 entries, needs 3", [&] { build_indptr(table.lens, two); });
}

TEST(BatchIndex, SlotsThatThePoolDoesNotHaveAreNamed) {
  Table table = make_table(16, {40, 20}, 3);
  std::vector<int32_t> indptr(3), indices(60);
  const auto slots = static_cast<int32_t>(table.pages * table.page_size);
  int32_t& used = table.slots[static_cast<size_t>(table.rows[1] * kContext + 7)];
  const auto expect = [&](const std::string& words) {
    expect_invalid(words, [&] { build_slot_indices(table.tokens(), indptr, indices); });
  };
  for (const int32_t wild : {-1, slots, kWild}) {
    used = wild;
    expect(fmt::format("request 1, token 7: slot {} is outside [16, {})", wild, slots));
  }
  used = slots - 1;
  EXPECT_NO_THROW(build_slot_indices(table.tokens(), indptr, indices));
  // The slots of a window pool with half the pages, over a full pool of as many as before.
  table.slot_map.assign(static_cast<size_t>(slots), 16);
  table.pages /= 2;
  EXPECT_NO_THROW(build_slot_indices(table.tokens(), indptr, indices));
  for (const int32_t wild : {-1, slots, kWild}) {
    used = wild;
    expect(fmt::format("slot {} is outside [0, {}), the slots of the full pool", wild, slots));
  }
  used = 0;
  EXPECT_NO_THROW(build_slot_indices(table.tokens(), indptr, indices));
  table.slot_map[0] = -1;
  expect("request 1, token 7: slot 0 has left the window pool");
}

}  // namespace
}  // namespace fovea
