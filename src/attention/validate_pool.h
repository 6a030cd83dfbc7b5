// SPDX-License-Identifier: Apache-2.0
// Whether a pool, which a caller may have implemented, is what the layers need.
#pragma once

#include "fovea/attention_backend.h"

namespace fovea {

// Throws Error{invalid_argument} where context.kv is given or null against the spec, is not on the
// context's device, is not for these layers (validate_cache), or the view of a layer contradicts
// the pool's spec, naming the field.
void validate_pool(const BackendContext& context);

}  // namespace fovea
