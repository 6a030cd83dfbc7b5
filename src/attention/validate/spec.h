// SPDX-License-Identifier: Apache-2.0
// What makes a request for a backend meaningless, whatever the backend.
#pragma once

#include "fovea/select_backend.h"

namespace fovea {

constexpr bool is_linear(AttentionKind kind) {
  return kind == AttentionKind::gated_delta_net || kind == AttentionKind::mamba2;
}

// Whether the layers keep their keys in a KvPool. Linear layers and packed scopes do not.
constexpr bool uses_kv_cache(const AttentionSpec& spec) {
  return !is_linear(spec.kind) && !is_packed(spec.scope);
}

// The scale in use: the spec's, or the default of its kind.
float softmax_scale(const AttentionSpec& spec);

// Throws Error{invalid_argument} that names the first field that contradicts another or is out of
// range: in the spec itself, between spec and cache, and in the limits.
void validate_spec(const AttentionSpec& spec);
void validate_cache(const AttentionSpec& spec, const KvCacheSpec& cache);
void validate_state(const AttentionSpec& spec, const StateCacheSpec& state);
void validate_limits(const AttentionSpec& spec, const BatchLimits& limits);
void validate_request(const BackendRequest& request);

}  // namespace fovea
