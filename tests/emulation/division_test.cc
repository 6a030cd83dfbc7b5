// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>

// clang-format off: device code needs the names of the first header.
#include "emulation/cuda.h"
#include "kernels/cuda/common/division.cuh"
// clang-format on

namespace fovea::kernels::cuda {
namespace {

constexpr int kMaxNumber = 1 << 30;    // short_quotient() takes numbers below this
constexpr int kMaxQuotient = 1 << 21;  // and returns numbers below this
constexpr int kUlps = 2;               // allowed error of __fdividef

// Expects the quotient for any allowed error of a GPU's division.
void expect_quotient(int64_t value, int64_t by) {
  if (value < 0 || value >= kMaxNumber || value / by >= kMaxQuotient) return;
  const int want = static_cast<int>(value / by);
  ASSERT_EQ(short_quotient(static_cast<int>(value), static_cast<int>(by)), want)
      << value << " / " << by;
  const float exact = static_cast<float>(value) / static_cast<float>(by);
  float low = exact;
  float high = exact;
  for (int ulp = 0; ulp < kUlps; ++ulp) {
    low = std::nextafter(low, 0.0f);
    high = std::nextafter(high, HUGE_VALF);
  }
  for (const float estimate : {low, high}) {
    ASSERT_EQ(put_right(static_cast<int>(estimate), static_cast<int>(value), static_cast<int>(by)),
              want)
        << value << " / " << by << " from " << estimate;
  }
}

// Quotients change at multiples of the divisor.
void expect_quotients_by(int64_t by) {
  for (int bit = 0; bit <= 21; ++bit) {
    for (int64_t multiple = (int64_t{1} << bit) - 2; multiple <= (int64_t{1} << bit) + 2;
         ++multiple) {
      for (int64_t more = -1; more <= 1; ++more) expect_quotient(multiple * by + more, by);
    }
  }
  const int64_t last = (kMaxNumber - 1) / by;
  for (int64_t multiple = last - 2; multiple <= last; ++multiple) {
    for (int64_t more = -1; more <= 1; ++more) expect_quotient(multiple * by + more, by);
  }
  expect_quotient(kMaxNumber - 1, by);
  expect_quotient(kMaxQuotient * by - 1, by);
}

TEST(Division, ShortQuotientsAreExactAtTheEdgesOfTheirRange) {
  for (int64_t by = 1; by <= 1100; ++by) expect_quotients_by(by);
  for (int bit = 11; bit <= 30; ++bit) {
    for (int64_t by = (int64_t{1} << bit) - 3; by <= (int64_t{1} << bit) + 3; ++by) {
      if (by < kMaxNumber) expect_quotients_by(by);
    }
  }
}

TEST(Division, ShortQuotientsOfRandomNumbersAreExact) {
  std::mt19937 random(1);
  for (int i = 0; i < 200000; ++i) {
    const auto bits = [&] { return static_cast<int>(random() >> 2 >> random() % 30); };
    const int by = std::max(bits(), 1);
    expect_quotient(bits(), by);
    if (i % 100 == 0) expect_quotients_by(by);
  }
}

}  // namespace
}  // namespace fovea::kernels::cuda
