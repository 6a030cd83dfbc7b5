// SPDX-License-Identifier: Apache-2.0
#include "core/strided_rows.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <limits>
#include <map>
#include <vector>

#include "support/expect_error.h"

namespace fovea {
namespace {

constexpr int64_t kFar = std::numeric_limits<int64_t>::max();

// Returns how many rows contain each byte.
std::map<int64_t, int> bytes_of(const StridedRows& rows) {
  std::map<int64_t, int> bytes;
  const auto& [x, y, z] = rows.dimensions;
  for (int64_t i = 0; i < x.count; ++i) {
    for (int64_t j = 0; j < y.count; ++j) {
      for (int64_t k = 0; k < z.count; ++k) {
        const int64_t first = i * x.stride + j * y.stride + k * z.stride;
        const int64_t begin = reinterpret_cast<intptr_t>(rows.data) + first * rows.element_bytes;
        for (int64_t b = 0; b < rows.row * rows.element_bytes; ++b) ++bytes[begin + b];
      }
    }
  }
  return bytes;
}

StridedRows any_rows() {
  StridedRows rows;
  rows.data = reinterpret_cast<const void*>(*rc::gen::inRange<intptr_t>(1000, 1100));
  rows.element_bytes = *rc::gen::element<int64_t>(1, 2, 4);
  rows.row = *rc::gen::inRange<int64_t>(1, 5);
  for (StridedRows::Dimension& dimension : rows.dimensions) {
    dimension = {*rc::gen::inRange<int64_t>(1, 4), *rc::gen::inRange<int64_t>(-3, 25)};
  }
  return rows;
}

TEST(StridedRows, DisjointRowsOverlapInNoByte) {
  int disjoint = 0;
  RC_ASSERT(rc::check([&disjoint] {
    const StridedRows rows = any_rows();
    if (!are_disjoint(rows)) return;
    ++disjoint;
    for (const auto& [byte, owners] : bytes_of(rows)) RC_ASSERT(owners == 1);
  }));
  EXPECT_GT(disjoint, 0);
}

TEST(StridedRows, LayoutsThatShareNoMemoryHaveNoByteInCommon) {
  int disjoint = 0;
  RC_ASSERT(rc::check([&disjoint] {
    const StridedRows a = any_rows(), b = any_rows();
    if (share_memory(a, b)) return;
    ++disjoint;
    const auto bytes = bytes_of(a);
    for (const auto& [byte, owners] : bytes_of(b)) RC_ASSERT(!bytes.contains(byte));
  }));
  EXPECT_GT(disjoint, 0);
}

// Three pages of four tokens and two heads of eight values, as engines lay out K and V.
TEST(StridedRows, LayoutsOfEnginesAreDisjoint) {
  constexpr int64_t kPages = 3, kTokens = 4, kHeads = 2, kDim = 8;
  struct Layout {
    const char* name;
    int64_t page, token, head, v;  // strides of K and V, and where V begins
  };
  std::vector<float> memory(2 * kPages * kTokens * kHeads * kDim);
  for (const Layout& layout : std::vector<Layout>{
           {"[2, page, token, head]", 64, 16, 8, 192},
           {"[page, 2, token, head]", 128, 16, 8, 64},
           {"[page, 2, head, token]", 128, 8, 32, 64},
           {"[page, token, 2, head]", 128, 32, 8, 16},
           {"[page, token, head, 2]", 128, 32, 16, 8},
           {"[2, head, page, token]", 32, 8, 96, 192},
       }) {
    SCOPED_TRACE(layout.name);
    const auto rows = [&](int64_t begin) {
      return StridedRows{
          .data = memory.data() + begin,
          .element_bytes = sizeof(float),
          .row = kDim,
          .dimensions = {{{kPages, layout.page}, {kTokens, layout.token}, {kHeads, layout.head}}}};
    };
    const StridedRows k = rows(0), v = rows(layout.v);
    EXPECT_TRUE(are_disjoint(k));
    EXPECT_FALSE(share_memory(k, v));
    EXPECT_FALSE(share_memory(v, k));
    EXPECT_TRUE(share_memory(k, k));
    EXPECT_TRUE(share_memory(k, rows(layout.v - 1)));
    EXPECT_TRUE(share_memory(rows(1), rows(layout.v)));
  }
}

TEST(StridedRows, AddressesHave63Bits) {
  const auto* data = reinterpret_cast<const void*>(intptr_t{1} << 40);
  const auto check = [&](int64_t bytes, int64_t row, int64_t count, int64_t stride) {
    check_reach(
        {.data = data, .element_bytes = bytes, .row = row, .dimensions = {{{count, stride}}}},
        "the rows");
  };
  EXPECT_NO_THROW(check(1, 1, 2, kFar - (int64_t{1} << 40) - 1));
  EXPECT_NO_THROW(check(8, 8, 1, kFar));  // a single row needs no stride
  EXPECT_NO_THROW(check(1, 1, 2, -(int64_t{1} << 40)));
  for (const auto& [bytes, row, count, stride] :
       std::vector<std::array<int64_t, 4>>{{1, 1, 2, kFar - (int64_t{1} << 40)},
                                           {1, 1, 2, -(int64_t{1} << 40) - 1},
                                           {8, 8, 2, kFar},
                                           {8, 8, int64_t{1} << 31, kFar},
                                           {8, 8, 2, std::numeric_limits<int64_t>::min()},
                                           {4, kFar, 1, 0}}) {
    test::expect_invalid("addresses exceed 63 bits", [&] { check(bytes, row, count, stride); });
  }
}

}  // namespace
}  // namespace fovea
