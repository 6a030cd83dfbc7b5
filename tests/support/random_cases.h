// SPDX-License-Identifier: Apache-2.0
// Random combinations of features, a part of attention_cases().
#pragma once

#include <vector>

#include "support/attention_case.h"

namespace fovea::test {

// Appends `count` cases, the same every time. A combination that contradicts itself is drawn again.
void add_random_cases(int count, std::vector<AttentionCase>& cases);

}  // namespace fovea::test
