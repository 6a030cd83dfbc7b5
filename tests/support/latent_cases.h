// SPDX-License-Identifier: Apache-2.0
// The part of the list of cases that is about caches of latent rows.
#pragma once

#include <vector>

#include "support/attention_case.h"

namespace fovea::test {

// Appends pages, heads, element types, trees, windows, weights and rotary positions of latent rows.
void add_latent_cases(std::vector<AttentionCase>& cases);

}  // namespace fovea::test
