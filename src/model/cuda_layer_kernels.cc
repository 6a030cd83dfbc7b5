// SPDX-License-Identifier: Apache-2.0
#include "model/cuda_layer_kernels.h"

#include <algorithm>

#include "core/rounding.h"
#include "kernels/cuda/family.h"

namespace fovea {

namespace cuda = kernels::cuda;
using kernels::Activation;

static_assert(static_cast<int>(Activation::silu) == cuda::kSilu &&
              static_cast<int>(Activation::gelu_tanh) == cuda::kGeluTanh &&
              static_cast<int>(Activation::clamped_swiglu) == cuda::kClampedSwiglu);

CudaLayerKernels::CudaLayerKernels(int sm, gpu::KernelStore& store) {
  const cuda::Family& layer_ops = cuda::family("portable/layer_ops");
  const auto load = [&](cuda::Kernel& kernel, const char* op) {
    kernel = cuda::Kernel(make_variant(layer_ops, {op}, sm), store);
  };
  load(residual, "residual");
  load(prepare_heads, "prepare_heads");
  load(gated_activation, "gated_activation");
  load(sigmoid_gate, "sigmoid_gate");
  load(gather, "gather");
  load(soft_cap, "soft_cap");
  load(routing, "routing");
  load(group_choices, "group_choices");
  load(combine, "combine");
  const cuda::Family& gemm = cuda::family("portable/expert_gemm");
  for (const int is_kn : {0, 1}) {
    const char* const layout = is_kn != 0 ? "true" : "false";
    expert_gemm_few[is_kn] = cuda::Kernel(make_variant(gemm, {"16", layout}, sm), store);
    expert_gemm_many[is_kn] = cuda::Kernel(make_variant(gemm, {"64", layout}, sm), store);
  }
}

cuda::GridSize element_grid(int64_t count) {
  constexpr int64_t kThreads = 256, kMaxBlocks = 4096;
  return {static_cast<uint32_t>(std::min(ceil_div(count, kThreads), kMaxBlocks))};
}

void launch_gated_activation(const CudaLayerKernels& kernels, const MlpParts& parts, Rows in,
                             Rows out, int64_t rows, Stream stream) {
  cuda::GatedParams params{};
  const auto* const gates = static_cast<const uint16_t*>(in.data);
  params.gate = gates;
  params.up = gates + (parts.alternates ? 1 : parts.width());
  params.out = out.data;
  params.in_stride = in.stride;
  params.out_stride = out.stride;
  params.in_step = parts.alternates ? 2 : 1;
  params.activation = static_cast<int32_t>(parts.activation);
  params.alpha = parts.bounds.alpha;
  params.limit = parts.bounds.limit;
  params.rows = rows;
  params.dim = parts.width();
  kernels.gated_activation.launch(element_grid(rows * params.dim), params, stream);
}

}  // namespace fovea
