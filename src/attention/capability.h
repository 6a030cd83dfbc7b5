// SPDX-License-Identifier: Apache-2.0
// The features of a backend, as data. Rejections, tables and documents derive from it.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <vector>

#include "fovea/select_backend.h"

namespace fovea {

// Empty lists and false mean "not supported"; every span points to static storage.
struct Capability {
  DeviceKind device = DeviceKind::cpu;
  int min_sm = 0, max_sm = std::numeric_limits<int>::max();  // GPUs
  std::span<const AttentionKind> kinds;
  std::span<const AttentionScope> scopes;
  std::span<const MaskKind> masks;
  std::span<const DType> q_dtypes;
  std::span<const DType> kv_dtypes;
  std::span<const KvScale> kv_scales;
  std::span<const KvLayout> kv_layouts;
  int32_t max_head_dim = 0;  // widest of q, k and v rows
  int32_t max_group = 0;     // q heads per kv head
  bool window = false, chunk = false, dual_chunk = false, logit_cap = false;
  bool sinks = false, alibi = false, rope = false, lse = false, batch_invariant = false;
};

// Returns a capability with every scope, mask, cache scale and score feature, and with no kinds,
// dtypes, layouts and sizes yet.
Capability every_feature();

// Returns the reason against a device, if there is one.
std::optional<Reason> device_reason(const Capability& capability, const DeviceInfo& device);

// Returns every reason against serving a request that validate_request() accepts.
std::vector<Reason> capability_reasons(const Capability& capability, const BackendRequest& request);

}  // namespace fovea
