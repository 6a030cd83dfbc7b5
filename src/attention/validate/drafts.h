// SPDX-License-Identifier: Apache-2.0
// Checks of the arguments of Speculation. They throw Error{invalid_argument} naming the array, the
// value and the limit. Extents are checked on every device, entries on the CPU only.
#pragma once

#include "fovea/speculation.h"

namespace fovea {

void check_drafts(const Drafts& drafts, const SpeculationLimits& limits);
void check_describe(const Drafts& drafts, const DraftPlaces& places, const DraftArrays& arrays);
void check_accept(const Drafts& drafts, const TargetTokens& target, const AcceptedDrafts& to);
void check_accept(const Drafts& drafts, const TargetProbabilities& target,
                  const AcceptedDrafts& to);
void check_commit(const Drafts& drafts, const DraftArrays& arrays, const AcceptedDrafts& accepted,
                  const CommittedArrays& committed);

// Entries of arrays in host memory.
void check_draft_entries(const Drafts& drafts);
void check_place_entries(const Drafts& drafts, const DraftPlaces& places);
void check_token_entries(const Drafts& drafts, int32_t vocabulary);
// `slots` are those of the smallest pool's addresses.
void check_commit_entries(const Drafts& drafts, const DraftArrays& arrays,
                          const AcceptedDrafts& accepted, int64_t slots);

}  // namespace fovea
