// SPDX-License-Identifier: Apache-2.0
// Cases for GPU backends only, a part of attention_cases().
#pragma once

#include <vector>

#include "support/attention_case.h"

namespace fovea::test {

// Append cases with several tiles and CTAs: MHA, and latent rows.
void add_long_cases(std::vector<AttentionCase>& cases);
void add_long_latent_cases(std::vector<AttentionCase>& cases);

}  // namespace fovea::test
