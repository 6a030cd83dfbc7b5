// SPDX-License-Identifier: Apache-2.0
#include "attention/cuda/entry.h"

#include <set>

#include "attention/cuda/backend.h"
#include "attention/cuda/layer.h"
#include "attention/cuda/prefixes.h"
#include "attention/entry.h"
#include "attention/names.h"
#include "attention/prefix_levels.h"
#include "attention/validate/spec.h"
#include "core/check.h"
#include "kernels/cuda/sm90/joint_plan/launch.h"
#include "kernels/cuda/store.h"

namespace fovea {
namespace {

namespace cuda = kernels::cuda;

constexpr AttentionKind kKinds[] = {AttentionKind::mha};
constexpr DType kQDtypes[] = {DType::f16, DType::bf16, DType::f8e4m3};
constexpr DType kKvDtypes[] = {DType::f16, DType::bf16, DType::f8e4m3, DType::f8e5m2};
constexpr KvLayout kKvLayouts[] = {KvLayout::mha};

constexpr int32_t kMaxRequests = 65535;  // rows of a grid
constexpr int64_t kRowAlignment = 16;    // bytes

cuda::AttentionSetup setup_of(const BackendRequest& request) {
  return {.spec = request.spec,
          .cache = request.cache,
          .sm = request.device.sm,
          .multiprocessors = request.device.cores,
          .layers = {}};
}

void check_rows(const BackendRequest& request, std::vector<Reason>& reasons) {
  const AttentionSpec& spec = request.spec;
  const bool cached = uses_kv_cache(spec);
  const DType stored = cached ? request.cache.dtype : spec.q_dtype;
  if (stored != spec.q_dtype && !is_fp8(stored)) {
    reasons.push_back({RejectCode::kv_dtype,
                       fmt::format("cache dtype is {}, accepted: q_dtype ({}) or an fp8 type",
                                   dtype_name(stored), dtype_name(spec.q_dtype))});
  }
  for (const int32_t dim : std::set{spec.head_dim, spec.head_dim_v}) {
    const int64_t bytes = dim * static_cast<int64_t>(dtype_bytes(stored));
    if (bytes % kRowAlignment == 0) continue;
    reasons.push_back({RejectCode::head_dim,
                       fmt::format("a head of {} {} values has {} bytes, accepted: multiples of {}",
                                   dim, dtype_name(stored), bytes, kRowAlignment)});
  }
  const bool hides_new_keys = spec.mask == MaskKind::none || spec.mask == MaskKind::tree;
  if (cached && request.cache.window > 0 && !hides_new_keys) {
    reasons.push_back(
        {RejectCode::window, fmt::format("mask {} needs all keys of a request, a window pool of {} "
                                         "has dropped some",
                                         name_of(spec.mask), request.cache.window)});
  }
  append_limit_reasons(request.limits, reasons);
}

constexpr int32_t kMaxFp8HeadDim = 128;  // limit of fp8 products

void check_fp8_products(const BackendRequest& request, std::vector<Reason>& reasons) {
  if (!is_fp8(request.spec.q_dtype)) return;
  if (request.cache.scale == KvScale::per_token_head) {
    reasons.push_back(
        {RejectCode::kv_scale,
         "a scale for each key would have to be multiplied into e4m3 weights; with fp8 "
         "queries accepted: none, per_tensor, per_head"});
  }
  const int32_t dim = std::max(request.spec.head_dim, request.spec.head_dim_v);
  if (dim > kMaxFp8HeadDim) {
    reasons.push_back(
        {RejectCode::head_dim,
         fmt::format("head_dim is {}, with fp8 queries at most {}", dim, kMaxFp8HeadDim)});
  }
}

// Appends a reason for every kernel that can neither be found nor compiled.
void check_kernels(const CudaKernels& kernels, const BackendRequest& request,
                   std::vector<Reason>& reasons) {
  const cuda::AttentionSetup setup = setup_of(request);
  std::vector<gpu::KernelVariant> needed;
  for (const auto* family : {kernels.prefill, kernels.decode_of(setup)}) {
    if (family == nullptr) continue;
    const std::vector<gpu::KernelVariant> variants = family->variants(setup);
    if (variants.empty()) {
      reasons.push_back(
          {RejectCode::kernels, fmt::format("{} has no variant for these layers", family->folder)});
    }
    needed.insert(needed.end(), variants.begin(), variants.end());
  }
  if (prefix_levels(kernels, request.spec, request.limits) > 0) {
    const auto groups = kernels.groups->variants(setup);
    needed.insert(needed.end(), groups.begin(), groups.end());
    const auto prefixes = prefix_variants(request.spec, setup.sm);
    needed.insert(needed.end(), prefixes.begin(), prefixes.end());
  }
  if (kernels.plans_jointly) needed.push_back(cuda::joint_plan_variant(setup.sm));
  if (uses_kv_cache(request.spec)) {
    needed.push_back(kv_write_variant(request.spec, request.cache, setup.sm));
  }
  append_missing_kernels(needed, reasons);
}

}  // namespace

Capability cuda_capability() {
  Capability can = every_feature();
  can.device = DeviceKind::cuda;
  can.kinds = kKinds;
  can.q_dtypes = kQDtypes;
  can.kv_dtypes = kKvDtypes;
  can.kv_layouts = kKvLayouts;
  can.max_group = 128;
  can.dual_chunk = false;
  return can;
}

void append_limit_reasons(const BatchLimits& limits, std::vector<Reason>& reasons) {
  if (limits.max_requests <= kMaxRequests) return;
  reasons.push_back({RejectCode::limits, fmt::format("max_requests is {}, at most {}",
                                                     limits.max_requests, kMaxRequests)});
}

void append_missing_kernels(std::span<const gpu::KernelVariant> needed,
                            std::vector<Reason>& reasons) {
  try {
    const gpu::KernelStore& store = cuda::kernel_store();
    for (const gpu::KernelVariant& variant : needed) {
      std::string reason = store.why_not(variant);
      if (!reason.empty()) reasons.push_back({RejectCode::kernels, std::move(reason)});
    }
  } catch (const Error& error) {
    reasons.push_back({RejectCode::kernels, error.what()});
  }
}

BackendEntry cuda_entry(BackendEntry entry, const CudaKernels& kernels,
                        const Capability& capability) {
  entry.graphs = GraphSupport::always;
  entry.reject = [capability, &kernels](const BackendRequest& request) {
    std::vector<Reason> reasons = capability_reasons(capability, request);
    check_rows(request, reasons);
    if (kernels.fp8_products) check_fp8_products(request, reasons);
    if (reasons.empty()) check_kernels(kernels, request, reasons);
    return reasons;
  };
  entry.workspace_bytes = [&kernels](const BackendRequest& request) {
    return cuda_workspace_bytes(kernels, setup_of(request), request.limits);
  };
  entry.create = [&kernels](const BackendContext& context) {
    return make_cuda_backend(kernels, context);
  };
  entry.notes = [&kernels](const BackendRequest& request) {
    std::string text = describe_prefix_levels(request.spec, request.limits);
    if (kernels.describe == nullptr || request.spec.batch_invariant) return text;
    const std::string choices = kernels.describe(setup_of(request), request.limits);
    if (!text.empty() && !choices.empty()) text += "; ";
    return text + choices;
  };
  return guarded(std::move(entry));
}

}  // namespace fovea
