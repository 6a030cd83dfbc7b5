// SPDX-License-Identifier: Apache-2.0
// Masks, soft caps and slopes over several key tiles, of which some are open to all rows of a tile,
// others partly or to none; part of attention_cases().
#pragma once

#include <vector>

#include "support/attention_case.h"

namespace fovea::test {

void add_tile_cases(std::vector<AttentionCase>& cases);

}  // namespace fovea::test
