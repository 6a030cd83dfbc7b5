// SPDX-License-Identifier: Apache-2.0
// Cases of dual chunk attention, a part of attention_cases().
#pragma once

#include <vector>

#include "support/attention_case.h"

namespace fovea::test {

void add_dual_chunk_cases(std::vector<AttentionCase>& cases);

}  // namespace fovea::test
