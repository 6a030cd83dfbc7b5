// SPDX-License-Identifier: Apache-2.0
// The part of the list of cases that only GPU backends are held against.
#pragma once

#include <vector>

#include "support/attention_case.h"

namespace fovea::test {

// Append requests of several tiles and CTAs: MHA, and latent rows.
void add_long_cases(std::vector<AttentionCase>& cases);
void add_long_latent_cases(std::vector<AttentionCase>& cases);

}  // namespace fovea::test
