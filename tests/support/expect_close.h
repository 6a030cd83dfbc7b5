// SPDX-License-Identifier: Apache-2.0
// Compares with the oracle by the rule of error_budget.h.
#pragma once

#include <gtest/gtest.h>

#include <span>

#include "support/oracle.h"

namespace fovea::test {

// Two values are near if they are equal, both NaN, or both finite with a difference of at most a
// finite `allowed`. An infinity is near to itself only, even if `allowed` is infinite.
::testing::AssertionResult is_near(double got, double want, double allowed);

// Compares the rows of one request. `lse` is empty if it was not asked for. If the oracle gives NaN
// or an infinity, the result must be the same. A failure names the worst row and element with both
// values, the allowed error, and the cosine distance.
::testing::AssertionResult is_close(const AttentionSpec& spec, const OracleResult& want,
                                    std::span<const float> out, std::span<const float> lse);

}  // namespace fovea::test
