// SPDX-License-Identifier: Apache-2.0
// Checks of a request that hold for every backend.
#pragma once

#include "fovea/select_backend.h"

namespace fovea {

// Returns true if the layers keep their keys in a KvPool. Linear layers and packed scopes do not.
constexpr bool uses_kv_cache(const AttentionSpec& spec) {
  return !is_linear(spec.kind) && !is_packed(spec.scope);
}

// Returns the scale in use: the spec's, or the default of its kind.
float softmax_scale(const AttentionSpec& spec);

// Each throws Error{invalid_argument} naming the first field that is out of range or contradicts
// another: in the spec, between spec and cache or state, in the limits, in the whole request.
void validate_spec(const AttentionSpec& spec);
void validate_cache(const AttentionSpec& spec, const KvCacheSpec& cache);
void validate_state(const AttentionSpec& spec, const StateCacheSpec& state);
void validate_limits(const AttentionSpec& spec, const BatchLimits& limits);
void validate_request(const BackendRequest& request);

}  // namespace fovea
