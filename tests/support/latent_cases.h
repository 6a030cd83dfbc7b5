// SPDX-License-Identifier: Apache-2.0
// Cases of caches of latent rows, a part of attention_cases().
#pragma once

#include <vector>

#include "support/attention_case.h"

namespace fovea::test {

// Appends cases of pages, heads, element types, trees, windows, weights and rotary positions.
void add_latent_cases(std::vector<AttentionCase>& cases);

}  // namespace fovea::test
