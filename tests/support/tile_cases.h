// SPDX-License-Identifier: Apache-2.0
// Cases of masks, soft caps and slopes over several key tiles, some of which are visible to all
// rows of a tile, some to a part, some to none; a part of attention_cases().
#pragma once

#include <vector>

#include "support/attention_case.h"

namespace fovea::test {

void add_tile_cases(std::vector<AttentionCase>& cases);

}  // namespace fovea::test
