// SPDX-License-Identifier: Apache-2.0
// The part of the list of cases that nobody chose: features in any combination.
#pragma once

#include <vector>

#include "support/attention_case.h"

namespace fovea::test {

// Appends `count` cases, the same ones every time. Each is one that selection takes for a request:
// what is contradictory in itself is drawn again.
void add_random_cases(int count, std::vector<AttentionCase>& cases);

}  // namespace fovea::test
