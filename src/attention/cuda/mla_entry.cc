// SPDX-License-Identifier: Apache-2.0
#include "attention/cuda/mla_entry.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>

#include "attention/cuda/entry.h"
#include "attention/cuda/mla_backend.h"
#include "attention/cuda/mla_cut.h"
#include "attention/cuda/mla_layer.h"
#include "attention/cuda/mla_up_projected.h"
#include "attention/entry.h"

namespace fovea {
namespace {

constexpr AttentionKind kKinds[] = {AttentionKind::mla};
constexpr AttentionScope kScopes[] = {AttentionScope::decoder};
constexpr MaskKind kMasks[] = {MaskKind::none, MaskKind::tree};
constexpr DType kDtypes[] = {DType::f16, DType::bf16};
constexpr DType kKvDtypes[] = {DType::f16, DType::bf16, DType::f8e4m3};
constexpr KvScale kKvScales[] = {KvScale::none, KvScale::per_tensor, KvScale::per_token_head};
constexpr KvLayout kKvLayouts[] = {KvLayout::mla, KvLayout::mla_fp8_rows};

// Columns of the kernels.
constexpr std::array kRanks = {512, 256};
constexpr std::array kRopeDims = {64, 0};
constexpr int32_t kProjectedGrain = 8;  // 16 bytes

template <typename List>
void unless_listed(const List& accepted, int32_t value, std::string_view name,
                   std::vector<Reason>& reasons) {
  if (std::ranges::find(accepted, value) != accepted.end()) return;
  reasons.push_back({RejectCode::head_dim, fmt::format("{} is {}, accepted: {}, {}", name, value,
                                                       accepted[0], accepted[1])});
}

void check_dims(const BackendRequest& request, std::vector<Reason>& reasons) {
  const AttentionSpec& spec = request.spec;
  if (spec.kind != AttentionKind::mla) return;
  unless_listed(kRanks, spec.mla.kv_lora_rank, "kv_lora_rank", reasons);
  unless_listed(kRopeDims, spec.mla.rope_dim, "rope_dim", reasons);
  for (const auto& [name, dim] :
       {std::pair{"nope_dim", spec.mla.nope_dim}, std::pair{"v_dim", spec.mla.v_dim}}) {
    if (dim % kProjectedGrain == 0) continue;
    reasons.push_back({RejectCode::head_dim, fmt::format("{} is {}, accepted: multiples of {}",
                                                         name, dim, kProjectedGrain)});
  }
}

void check_types(const BackendRequest& request, std::vector<Reason>& reasons) {
  const AttentionSpec& spec = request.spec;
  const DType stored = request.cache.dtype;
  if (spec.kind != AttentionKind::mla || stored == spec.q_dtype || is_fp8(stored)) return;
  reasons.push_back(
      {RejectCode::kv_dtype, fmt::format("cache dtype is {}, accepted: q_dtype ({}), fp8_e4m3",
                                         dtype_name(stored), dtype_name(spec.q_dtype))});
}

void check_pool(const BackendRequest& request, std::vector<Reason>& reasons) {
  if (request.spec.kind != AttentionKind::mla || request.cache.window == 0) return;
  reasons.push_back({RejectCode::window, fmt::format("cache window is {}, accepted: 0: latents "
                                                     "that left a window are kept",
                                                     request.cache.window)});
}

MlaCut cut_of(const MlaKernels& kernels, const BackendRequest& request) {
  return cut_mla({&kernels, request.spec, request.cache, request.device, {}}, request.limits);
}

}  // namespace

Capability mla_capability() {
  Capability can;
  can.device = DeviceKind::cuda;
  can.kinds = kKinds;
  can.scopes = kScopes;
  can.masks = kMasks;
  can.q_dtypes = kDtypes;
  can.kv_dtypes = kKvDtypes;
  can.kv_scales = kKvScales;
  can.kv_layouts = kKvLayouts;
  can.max_head_dim = kRanks.front() + kRopeDims.front();
  can.max_group = 128;
  can.rope = can.lse = true;
  can.batch_invariant = true;  // whole tiles: keys lie the same whatever a batch holds
  return can;
}

BackendEntry mla_entry(BackendEntry entry, const MlaKernels& kernels,
                       const Capability& capability) {
  entry.name = kernels.name;
  entry.graphs = GraphSupport::always;
  entry.reject = [&kernels, capability](const BackendRequest& request) {
    std::vector<Reason> reasons = capability_reasons(capability, request);
    check_dims(request, reasons);
    check_types(request, reasons);
    check_pool(request, reasons);
    append_limit_reasons(request.limits, reasons);
    if (reasons.empty()) {
      append_missing_kernels(mla_variants(kernels, request.spec, request.cache, request.device,
                                          cut_of(kernels, request).heads),
                             reasons);
    }
    return reasons;
  };
  entry.workspace_bytes = [&kernels](const BackendRequest& request) {
    return mla_workspace_bytes(kernels, request.spec, request.cache, request.device,
                               request.limits);
  };
  entry.create = [&kernels](const BackendContext& context) {
    return make_mla_backend(kernels, context);
  };
  entry.notes = [&kernels](const BackendRequest& request) {
    const AttentionSpec& spec = request.spec;
    const auto [heads, room] = cut_of(kernels, request);
    std::string text = describe_mla_forms(
        spec, fmt::format("up to {} rows at once (of all heads up to {}), more context in chunks",
                          room.rows, room.head_rows / spec.q_heads));
    if (heads < spec.q_heads) {
      text += fmt::format(
          "; passes of more than {} tokens are computed {} heads at a time, to keep to {} bytes of "
          "workspace",
          int64_t{request.limits.max_tokens} * heads / spec.q_heads, heads,
          request.limits.workspace_budget);
    }
    return text;
  };
  return guarded(std::move(entry));
}

}  // namespace fovea
