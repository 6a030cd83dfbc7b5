// SPDX-License-Identifier: Apache-2.0
// The fields of a body that say how tokens are chosen.
#pragma once

#include "server/completion_request.h"
#include "server/fields.h"

namespace fovea::server {

// Fills `request.sampling` and what belongs to it: the seed, log-probabilities, dropped output.
// `max_tokens` is used if the client names no limit.
void read_sampling(Fields& body, const Engine& engine, CompletionRequest& request);

}  // namespace fovea::server
