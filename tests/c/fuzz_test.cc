// SPDX-License-Identifier: Apache-2.0
// Random wrong arguments, the same in every run. `make fuzz` runs the same calls for longer.
#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "c/fuzz_calls.h"
#include "support/cases.h"

namespace fovea::test {
namespace {

TEST(FuzzInC, EveryCallSucceedsOrNamesAnArgument) {
  FuzzCount count;
  for (int seed = 1; seed <= 300 * test_scale(); ++seed) {
    std::mt19937 random(static_cast<uint32_t>(seed));
    std::vector<uint8_t> bytes(2000);
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
    ASSERT_EQ(fuzz_calls(bytes, count), "") << "seed " << seed;
  }
  // Both kinds of results must occur often, or the calls test little.
  EXPECT_GT(count.accepted, count.calls / 20);
  EXPECT_LT(count.accepted, count.calls * 3 / 4);
  std::cout << count.calls << " calls, " << count.accepted << " accepted\n";
}

}  // namespace
}  // namespace fovea::test
