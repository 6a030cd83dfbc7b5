// SPDX-License-Identifier: Apache-2.0
// What a backend can do, as data: rejections, tables and documents derive from it.
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
  std::span<const int32_t> page_sizes;  // empty: any
  int32_t max_head_dim = 0;             // of q, k and v
  int32_t max_group = 0;                // q heads per kv head
  int32_t max_kv_len = std::numeric_limits<int32_t>::max();
  bool window = false, chunk = false, dual_chunk = false, logit_cap = false;
  bool sinks = false, alibi = false, rope = false, lse = false, batch_invariant = false;
};

// Every scope, mask, scale of a cache and change of scores; nothing yet of kinds, dtypes, layouts
// and sizes.
Capability every_feature();

// The reason against a device, if there is one.
std::optional<Reason> device_reason(const Capability& capability, const DeviceInfo& device);

// Every reason against serving a request that validate_request() accepts.
std::vector<Reason> capability_reasons(const Capability& capability, const BackendRequest& request);

}  // namespace fovea
