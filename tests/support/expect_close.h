// SPDX-License-Identifier: Apache-2.0
// Comparison against the oracle by the rule of error_budget.h.
#pragma once

#include <gtest/gtest.h>

#include <span>

#include "support/oracle.h"

namespace fovea::test {

// One request's rows. `lse` is empty when it was not asked for. A failure names the worst row and
// element with both values, the error allowed, and the cosine distance.
::testing::AssertionResult is_close(const AttentionSpec& spec, const OracleResult& want,
                                    std::span<const float> out, std::span<const float> lse);

}  // namespace fovea::test
