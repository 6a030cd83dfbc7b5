// SPDX-License-Identifier: Apache-2.0
// The part of the list of cases that is about what caches hold.
#pragma once

#include <vector>

#include "support/attention_case.h"

namespace fovea::test {

// Appends element types and scales, fp8 products, pools, rotary positions.
void add_cache_cases(std::vector<AttentionCase>& cases);

}  // namespace fovea::test
