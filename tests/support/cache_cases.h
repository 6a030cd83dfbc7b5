// SPDX-License-Identifier: Apache-2.0
// Cases about the contents of caches, a part of attention_cases().
#pragma once

#include <vector>

#include "support/attention_case.h"

namespace fovea::test {

// Appends cases of element types and scales, fp8 products, pools, rotary positions.
void add_cache_cases(std::vector<AttentionCase>& cases);

}  // namespace fovea::test
