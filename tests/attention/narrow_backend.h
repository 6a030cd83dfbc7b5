// SPDX-License-Identifier: Apache-2.0
// A request and a backend that serves just that, for tests of the choice and of its table.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "attention/capability.h"
#include "fovea/select_backend.h"

namespace fovea::test {

inline BackendRequest gqa_request() {
  BackendRequest request;
  request.spec = {.q_heads = 4, .kv_heads = 2, .head_dim = 64, .head_dim_v = 64};
  request.cache = {.layers = 1, .kv_heads = 2, .head_dim = 64, .head_dim_v = 64, .page_size = 16};
  request.limits = {.max_requests = 4, .max_tokens = 8, .max_q_len = 8, .max_kv_len = 64};
  request.device = cpu_device();
  return request;
}

inline constexpr AttentionKind kMhaOnly[] = {AttentionKind::mha};
inline constexpr AttentionScope kDecoderOnly[] = {AttentionScope::decoder};
inline constexpr MaskKind kNoMask[] = {MaskKind::none};
inline constexpr DType kF32[] = {DType::f32};
inline constexpr KvScale kNoScale[] = {KvScale::none};
inline constexpr KvLayout kMhaLayout[] = {KvLayout::mha};

// Serves gqa_request() and nothing beyond it.
inline Capability narrow() {
  Capability can;
  can.kinds = kMhaOnly;
  can.scopes = kDecoderOnly;
  can.masks = kNoMask;
  can.q_dtypes = can.kv_dtypes = kF32;
  can.kv_scales = kNoScale;
  can.kv_layouts = kMhaLayout;
  can.max_head_dim = 64;
  can.max_group = 2;
  return can;
}

inline BackendEntry entry_of(std::string name, const Capability& can) {
  BackendEntry entry;
  entry.name = std::move(name);
  entry.reject = [can](const BackendRequest& request) { return capability_reasons(can, request); };
  entry.workspace_bytes = [](const BackendRequest&) -> size_t { return 128; };
  entry.create = [](const BackendContext&) { return std::unique_ptr<AttentionBackend>(); };
  return entry;
}

}  // namespace fovea::test
