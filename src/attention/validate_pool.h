// SPDX-License-Identifier: Apache-2.0
// Whether a pool, which a caller may have implemented, is what the layers need.
#pragma once

#include "fovea/attention_spec.h"
#include "fovea/device.h"
#include "fovea/kv_cache.h"

namespace fovea {

// Throws Error{invalid_argument} where the pool is not on `device`, its spec is not that of the
// layers (validate_cache), or the view of a layer contradicts the pool's spec, naming the field.
void validate_pool(const KvPool& pool, const AttentionSpec& spec, Device device);

}  // namespace fovea
