// SPDX-License-Identifier: Apache-2.0
// Checks of pools, which callers may implement. They throw Error{invalid_argument} and read no
// memory of the pool.
#pragma once

#include "fovea/attention_backend.h"

namespace fovea {

// Throws if context.kv is given or null contrary to the spec, is not on the context's device, is
// not for these layers (validate_cache), or has a view that contradicts the pool's spec, naming the
// field. Also throws, naming the strides, if rows of a view overlap, run backwards, are misaligned
// or exceed 63-bit addresses, or if two layers overlap without being the same.
void validate_pool(const BackendContext& context);
// Checks context.state and its layers in the same way.
void validate_state_pool(const BackendContext& context);

}  // namespace fovea
