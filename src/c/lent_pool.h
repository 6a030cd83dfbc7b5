// SPDX-License-Identifier: Apache-2.0
// A pool over memory that a C program lends.
#pragma once

#include <memory>

#include "fovea/fovea.h"
#include "fovea/kv_cache.h"

namespace fovea::c {

inline constexpr fovea_lent_pool kDefaultLentPool = {.struct_size = sizeof(fovea_lent_pool),
                                                     .reserves_page_zero = 1};

// Throws Error{invalid_argument} naming the tensor of a layer, its value and the limit.
std::shared_ptr<KvPool> make_lent_pool(const fovea_lent_pool* lent);

}  // namespace fovea::c
