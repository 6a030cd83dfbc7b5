// SPDX-License-Identifier: Apache-2.0
// `linear_cuda`: linear layers on any NVIDIA GPU from Ampere.
#include <limits>

#include "attention/backends/backends.h"
#include "attention/cuda/entry.h"
#include "attention/cuda/linear_backend.h"
#include "attention/entry.h"
#include "gpu/architectures.h"
#include "kernels/cuda/portable/causal_conv/launch.h"
#include "kernels/cuda/portable/recurrence/launch.h"

namespace fovea {
namespace {

constexpr char kName[] = "linear_cuda";
constexpr AttentionKind kKinds[] = {
    AttentionKind::gated_delta_net, AttentionKind::mamba2, AttentionKind::kda,
    AttentionKind::lightning,       AttentionKind::mamba1, AttentionKind::short_conv};
constexpr DType kQDtypes[] = {DType::f32, DType::bf16};
constexpr int32_t kVector = 4;  // values that a kernel reads at once

Capability capability() {
  Capability can = cuda_capability();
  can.min_sm = gpu::kAmpere;
  can.kinds = kKinds;
  can.q_dtypes = kQDtypes;
  can.max_head_dim = std::numeric_limits<int32_t>::max();
  can.batch_invariant = true;
  return can;
}

void check_dims(const LinearSpec& linear, std::vector<Reason>& reasons) {
  const auto refuse = [&](std::string text) {
    reasons.push_back({RejectCode::head_dim, std::move(text)});
  };
  if (linear.key_dim > kernels::cuda::kMaxStateColumns || linear.key_dim % kVector != 0) {
    refuse(fmt::format("linear.key_dim is {}, accepted: multiples of {} up to {}", linear.key_dim,
                       kVector, kernels::cuda::kMaxStateColumns));
  }
  const int64_t values = int64_t{linear.value_heads} * linear.value_dim;
  if (values % kVector != 0) {
    refuse(fmt::format("linear.value_heads * linear.value_dim is {}, accepted: multiples of {}",
                       values, kVector));
  }
  if (linear.conv_width > kernels::cuda::kMaxConvWidth) {
    refuse(fmt::format("linear.conv_width is {}, at most {}", linear.conv_width,
                       kernels::cuda::kMaxConvWidth));
  }
}

}  // namespace

BackendEntry linear_cuda_backend() {
  BackendEntry entry;
  entry.name = kName;
  entry.role =
      "gated delta net, KDA, Mamba, lightning attention and short convolutions on any NVIDIA GPU "
      "from Ampere";
  entry.graphs = GraphSupport::always;
  entry.reject = [](const BackendRequest& request) {
    std::vector<Reason> reasons = capability_reasons(capability(), request);
    if (is_linear(request.spec.kind)) check_dims(request.spec.linear, reasons);
    append_limit_reasons(request.limits, reasons);
    if (reasons.empty()) {
      append_missing_kernels(cuda_linear_variants(request.spec, request.device), reasons);
    }
    return reasons;
  };
  entry.workspace_bytes = [](const BackendRequest& request) {
    return cuda_linear_workspace_bytes(request.spec, request.limits, request.device);
  };
  entry.create = [](const BackendContext& context) { return make_cuda_linear(kName, context); };
  return guarded(std::move(entry));
}

}  // namespace fovea
