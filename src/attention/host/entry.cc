// SPDX-License-Identifier: Apache-2.0
#include "attention/host/entry.h"

#include <fmt/core.h>

#include <limits>

#include "attention/entry.h"
#include "attention/host/dual_chunk.h"
#include "attention/host/linear.h"
#include "attention/host/mha.h"
#include "attention/host/mla.h"
#include "attention/mla_forms.h"
#include "attention/prefix_levels.h"
#include "attention/validate/spec.h"

namespace fovea {
namespace {

constexpr AttentionKind kKinds[] = {
    AttentionKind::mha,    AttentionKind::mla,       AttentionKind::gated_delta_net,
    AttentionKind::mamba2, AttentionKind::kda,       AttentionKind::lightning,
    AttentionKind::mamba1, AttentionKind::short_conv};
constexpr DType kQDtypes[] = {DType::f32, DType::f16, DType::bf16};
constexpr DType kKvDtypes[] = {DType::f32, DType::f16, DType::bf16, DType::f8e4m3, DType::f8e5m2};
constexpr KvLayout kKvLayouts[] = {KvLayout::mha, KvLayout::mla, KvLayout::mla_fp8_rows};

size_t workspace_bytes(const HostShape& shape, const BatchLimits& limits) {
  if (is_linear(shape.spec.kind)) return host_linear_workspace_bytes(shape, limits);
  if (shape.spec.kind == AttentionKind::mla) return host_mla_workspace_bytes(shape, limits);
  return host_mha_workspace_bytes(shape, limits);
}

std::unique_ptr<AttentionBackend> create(const HostKernels& kernels,
                                         const BackendContext& context) {
  if (is_linear(context.spec.kind)) return make_host_linear(kernels, context);
  if (context.spec.kind == AttentionKind::mla) return make_host_mla(kernels, context);
  return make_host_mha(kernels, context);
}

}  // namespace

Capability host_capability() {
  Capability can = every_feature();
  can.kinds = kKinds;
  can.q_dtypes = kQDtypes;
  can.kv_dtypes = kKvDtypes;
  can.kv_layouts = kKvLayouts;
  can.max_head_dim = std::numeric_limits<int32_t>::max();
  can.max_group = std::numeric_limits<int32_t>::max();
  can.batch_invariant = true;
  return can;
}

BackendEntry host_entry(BackendEntry entry, const HostKernels& kernels,
                        const Capability& capability) {
  entry.graphs = GraphSupport::never;  // a CPU has no graphs
  entry.reject = [capability, &kernels](const BackendRequest& request) {
    std::vector<Reason> reasons = capability_reasons(capability, request);
    if (kernels.needs_isa && kernels.isa() == kernels::cpu::Isa::none) {
      reasons.push_back(
          {RejectCode::device, "this processor or this build has neither AVX2 nor AVX-512"});
    }
    return reasons;
  };
  entry.workspace_bytes = [&kernels](const BackendRequest& request) {
    return workspace_bytes({&kernels, request.spec, request.cache, request.device.cores},
                           request.limits);
  };
  entry.create = [&kernels](const BackendContext& context) { return create(kernels, context); };
  entry.notes = [](const BackendRequest& request) {
    const AttentionSpec& spec = request.spec;
    if (spec.kind == AttentionKind::mla) {
      return describe_mla_forms(spec, fmt::format("context in chunks of {} rows", kMlaChunkRows));
    }
    return spec.dual_chunk ? describe_dual_chunk(spec)
                           : describe_prefix_levels(spec, request.limits);
  };
  return guarded(std::move(entry));
}

}  // namespace fovea
