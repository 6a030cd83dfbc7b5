// SPDX-License-Identifier: Apache-2.0
// Comparison against the oracle by the rule of error_budget.h.
#pragma once

#include <gtest/gtest.h>

#include <span>

#include "support/oracle.h"

namespace fovea::test {

// Two values are near if they are equal, both NaN, or both finite and at most a finite `allowed`
// apart. An infinity is near to itself alone, also where `allowed` is a multiple of it.
::testing::AssertionResult is_near(double got, double want, double allowed);

// One request's rows. `lse` is empty when it was not asked for. Where the oracle wants NaN or an
// infinity, only that will do. A failure names the worst row and element with both values, the
// error allowed, and the cosine distance.
::testing::AssertionResult is_close(const AttentionSpec& spec, const OracleResult& want,
                                    std::span<const float> out, std::span<const float> lse);

}  // namespace fovea::test
