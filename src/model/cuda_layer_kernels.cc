// SPDX-License-Identifier: Apache-2.0
#include "model/cuda_layer_kernels.h"

namespace fovea {

namespace cuda = kernels::cuda;
using kernels::Activation;

static_assert(static_cast<int>(Activation::silu) == cuda::kSilu &&
              static_cast<int>(Activation::gelu_tanh) == cuda::kGeluTanh &&
              static_cast<int>(Activation::clamped_swiglu) == cuda::kClampedSwiglu);

void launch_gated_activation(const cuda::LayerOps& ops, const MlpParts& parts, Rows in, Rows out,
                             int64_t rows, Stream stream) {
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
  ops.gated_activation(params, stream);
}

}  // namespace fovea
