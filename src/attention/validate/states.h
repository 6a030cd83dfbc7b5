// SPDX-License-Identifier: Apache-2.0
// Checks of the arguments of StateMerger::merge().
#pragma once

#include <cstdint>

#include "fovea/merge_states.h"

namespace fovea {

// Throws Error{invalid_argument} for a number of tokens that is negative or beyond int32.
void check_tokens(int64_t tokens);

// Throws Error{invalid_argument} for null or misaligned arrays, dtypes other than the shape's and
// written rows that overlap each other or rows that are read.
void check_states(const AttentionState& into, const AttentionState& part, const StateShape& shape,
                  int64_t tokens);

}  // namespace fovea
