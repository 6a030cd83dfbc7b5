// SPDX-License-Identifier: Apache-2.0
// Whether a pool, which a caller may have implemented, is what the layers need. Both throw
// Error{invalid_argument}.
#pragma once

#include "fovea/attention_backend.h"

namespace fovea {

// Where context.kv is given or null against the spec, is not on the context's device, is not for
// these layers (validate_cache), or the view of a layer contradicts the pool's spec, naming the
// field. Where rows of a view overlap, run backwards, are misaligned or exceed 63-bit addresses,
// and where two layers overlap without being one, naming the strides. No memory is read.
void validate_pool(const BackendContext& context);
// The same for context.state and its layers.
void validate_state_pool(const BackendContext& context);

}  // namespace fovea
