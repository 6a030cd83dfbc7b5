// SPDX-License-Identifier: Apache-2.0
// The comparisons that other tests rely on: accepted and, above all, refused values.
#include "support/expect_close.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace fovea {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

struct Pair {
  double want, got;
  bool near;
};

// Pairs that need no tolerance. Other tests have finite numbers near each other.
const std::vector<Pair> kPairs = {{-kInfinity, -kInfinity, true},
                                  {-kInfinity, kInfinity, false},
                                  {-kInfinity, 0, false},
                                  {-kInfinity, 1e30, false},
                                  {-kInfinity, -1e30, false},
                                  {-kInfinity, kNan, false},
                                  {kInfinity, kInfinity, true},
                                  {kInfinity, -kInfinity, false},
                                  {kInfinity, 0, false},
                                  {kInfinity, 1e30, false},
                                  {kInfinity, kNan, false},
                                  {kNan, kNan, true},
                                  {kNan, 0, false},
                                  {kNan, kInfinity, false},
                                  {kNan, -kInfinity, false},
                                  {0, 0, true},
                                  {0, kNan, false},
                                  {0, kInfinity, false},
                                  {0, -kInfinity, false},
                                  {3, 3, true},
                                  {3, kNan, false},
                                  {3, kInfinity, false},
                                  {3, -kInfinity, false},
                                  {3, 4, false},
                                  {0, 1, false},
                                  {-1e30, -kInfinity, false}};

AttentionSpec one_head_of(int32_t width) {
  AttentionSpec spec;
  spec.q_heads = spec.kv_heads = 1;
  spec.head_dim = spec.head_dim_v = width;
  spec.q_dtype = DType::f32;
  return spec;
}

test::OracleResult wanted(std::vector<double> out, std::vector<double> lse) {
  test::OracleResult want;
  want.exact.out = want.plain.out = std::move(out);
  want.exact.lse = want.plain.lse = std::move(lse);
  return want;
}

TEST(IsNear, HoldsInfinitiesAndNanToThemselves) {
  for (const Pair& pair : kPairs) {
    // The allowance in the form of the tests, which an infinity makes infinite.
    for (const double allowed : {0x1p-20, 0x1p-20 * std::max(1.0, std::fabs(pair.want))}) {
      EXPECT_EQ(test::is_near(pair.got, pair.want, allowed), pair.near)
          << "want " << pair.want << ", got " << pair.got << ", allowed " << allowed;
    }
  }
}

TEST(IsNear, AllowsTheErrorAndNoMore) {
  EXPECT_TRUE(test::is_near(1.5, 1, 0.5));
  EXPECT_FALSE(test::is_near(1.5, 1, 0.499));
  EXPECT_FALSE(test::is_near(1.5, 1, kInfinity));
  EXPECT_FALSE(test::is_near(1.5, 1, kNan));
}

TEST(IsClose, LseHoldsInfinitiesAndNanToThemselves) {
  const AttentionSpec spec = one_head_of(2);
  for (const Pair& pair : kPairs) {
    const std::vector<float> out = {1, 2, 1, 2};
    const std::vector<float> lse = {1, static_cast<float>(pair.got)};
    EXPECT_EQ(test::is_close(spec, wanted({1, 2, 1, 2}, {1, pair.want}), out, lse), pair.near)
        << "want " << pair.want << ", got " << pair.got;
  }
}

TEST(IsClose, OutHoldsInfinitiesAndNanToThemselves) {
  const AttentionSpec spec = one_head_of(2);
  for (const Pair& pair : kPairs) {
    // The first element, the last one, and both.
    const float got = static_cast<float>(pair.got);
    EXPECT_EQ(test::is_close(spec, wanted({1, pair.want}, {0}), std::vector{1.0f, got}, {}),
              pair.near)
        << "want " << pair.want << ", got " << pair.got;
    EXPECT_EQ(test::is_close(spec, wanted({pair.want, 1}, {0}), std::vector{got, 1.0f}, {}),
              pair.near)
        << "want " << pair.want << ", got " << pair.got;
    EXPECT_EQ(test::is_close(spec, wanted({pair.want, pair.want}, {0}), std::vector{got, got}, {}),
              pair.near)
        << "want " << pair.want << ", got " << pair.got;
  }
}

// A correct infinity does not change the comparison of other elements and rows.
TEST(IsClose, AnInfinityExcusesNoOtherElement) {
  const AttentionSpec spec = one_head_of(2);
  const float infinity = INFINITY;
  const test::OracleResult want = wanted({1, kInfinity, 2, 3}, {-kInfinity, 4});
  const std::vector<float> out = {1, infinity, 2, 3}, lse = {-infinity, 4};
  EXPECT_TRUE(test::is_close(spec, want, out, lse));
  for (const size_t wrong : {0, 2, 3}) {
    std::vector<float> off = out;
    off[wrong] += 0.01f;
    EXPECT_FALSE(test::is_close(spec, want, off, lse)) << wrong;
  }
  EXPECT_FALSE(test::is_close(spec, want, out, std::vector{-infinity, 4.01f}));
}

// If the plain computation overflows, no value passes.
TEST(IsClose, NothingIsAllowedByAPlainErrorWithoutEnd) {
  const AttentionSpec spec = one_head_of(2);
  for (const double plain : {kInfinity, -kInfinity, kNan}) {
    test::OracleResult want = wanted({1, 2}, {3});
    want.plain.out[1] = plain;
    EXPECT_FALSE(test::is_close(spec, want, std::vector{1.0f, 5.0f}, std::vector{3.0f}));
    want = wanted({1, 2}, {3});
    want.plain.lse[0] = plain;
    EXPECT_FALSE(test::is_close(spec, want, std::vector{1.0f, 2.0f}, std::vector{5.0f}));
  }
}

TEST(IsClose, AllowsTwiceThePlainErrorAndAFewUnits) {
  const AttentionSpec spec = one_head_of(2);
  test::OracleResult want = wanted({1, 2}, {3});
  want.plain.out[1] = 2 + 0x1p-12;
  want.plain.lse[0] = 3 + 0x1p-12;
  const float refused = 0x1p-9f;
  EXPECT_TRUE(test::is_close(spec, want, std::vector{1.0f, 2.0f}, std::vector{3 + 0x1p-11f}));
  EXPECT_FALSE(test::is_close(spec, want, std::vector{1.0f, 2.0f}, std::vector{3 + refused}));
  want.exact.out[0] = want.plain.out[0] = 0;  // keeps the direction
  EXPECT_TRUE(test::is_close(spec, want, std::vector{0.0f, 2 + 0x1p-11f}, std::vector{3.0f}));
  EXPECT_FALSE(test::is_close(spec, want, std::vector{0.0f, 2 + refused}, std::vector{3.0f}));
}

TEST(IsClose, RefusesOtherNumbersOfValues) {
  const AttentionSpec spec = one_head_of(2);
  const test::OracleResult want = wanted({1, 2, 1, 2}, {3, 3});
  EXPECT_FALSE(test::is_close(spec, want, std::vector{1.0f, 2.0f}, {}));
  EXPECT_FALSE(test::is_close(spec, want, std::vector{1.0f, 2.0f, 1.0f, 2.0f}, std::vector{3.0f}));
}

}  // namespace
}  // namespace fovea
