// SPDX-License-Identifier: Apache-2.0
#include "core/rounding.h"

#include <gtest/gtest.h>

namespace fovea {
namespace {

TEST(PowerOfTwoIn, IsRightForEveryAddress) {
  struct Case {
    uint64_t value, limit, want;
  };
  constexpr uint64_t k4GiB = uint64_t{1} << 32;
  for (const Case& c : {Case{0, 256, 256}, Case{1, 256, 1}, Case{2, 256, 2}, Case{96, 256, 32},
                        Case{255, 256, 1}, Case{256, 256, 256}, Case{768, 256, 256},
                        // From here on, a 32-bit shift by the number of trailing zeros is
                        // undefined.
                        Case{k4GiB, 256, 256}, Case{2 * k4GiB, 256, 256}, Case{3 * k4GiB, 256, 256},
                        Case{k4GiB + 16, 256, 16}, Case{uint64_t{1} << 47, 256, 256},
                        Case{uint64_t{1} << 63, 256, 256}, Case{UINT64_MAX, 256, 1}, Case{12, 1, 1},
                        Case{k4GiB, uint64_t{1} << 40, k4GiB}}) {
    EXPECT_EQ(power_of_two_in(c.value, c.limit), c.want) << c.value << ", limit " << c.limit;
  }
}

}  // namespace
}  // namespace fovea
