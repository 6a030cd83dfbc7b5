// SPDX-License-Identifier: Apache-2.0
#include "model/cuda_layer_kernels.h"

#include "core/rounding.h"
#include "model/cuda_layout.h"

namespace fovea {

namespace cuda = kernels::cuda;
using kernels::Activation;

static_assert(static_cast<int>(Activation::silu) == cuda::kSilu &&
              static_cast<int>(Activation::gelu_tanh) == cuda::kGeluTanh &&
              static_cast<int>(Activation::clamped_swiglu) == cuda::kClampedSwiglu);

const void* bias_of(const Linear& weights, DType out) {
  if (weights.bias == nullptr) return nullptr;
  const size_t f32_bytes = static_cast<size_t>(weights.n) * sizeof(float);
  const size_t offset = out == DType::f32 ? 0 : round_up(f32_bytes, kCudaAlignment);
  return reinterpret_cast<const std::byte*>(weights.bias) + offset;
}

cuda::SkinnyGemmParams skinny_params(const Linear& weights, Rows x, Rows out, int64_t rows) {
  cuda::SkinnyGemmParams params{};
  params.x = x.data;
  params.weight = weights.weight;
  params.bias = bias_of(weights, out.dtype);
  params.out = out.data;
  params.x_stride = x.stride;
  params.weight_stride = weights.stride;
  params.out_stride = out.stride;
  params.rows = static_cast<int32_t>(rows);
  params.n = weights.n;
  params.k = weights.k;
  params.out_is_f32 = out.dtype == DType::f32;
  return params;
}

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
