// SPDX-License-Identifier: Apache-2.0
#include "model/cuda_layer_kernels.h"

namespace fovea {

namespace cuda = kernels::cuda;

cuda::DeltaInputsKernelParams to_kernel(const kernels::DeltaInputsParams& params) {
  return {.qkvz = params.qkvz,
          .ba = params.ba,
          .a_log = params.a_log,
          .dt_bias = params.dt_bias,
          .mixed = params.mixed,
          .z = params.z,
          .log_decay = params.log_decay,
          .beta = params.beta,
          .rows = static_cast<int32_t>(params.rows),
          .key_heads = params.key_heads,
          .value_heads = params.value_heads,
          .key_dim = params.key_dim,
          .value_dim = params.value_dim};
}

cuda::Mamba2InputsKernelParams to_kernel(const kernels::Mamba2InputsParams& params) {
  return {.projected = params.projected,
          .a_log = params.a_log,
          .dt_bias = params.dt_bias,
          .dt_min = params.dt_min,
          .dt_max = params.dt_max,
          .z = params.z,
          .mixed = params.mixed,
          .log_decay = params.log_decay,
          .dt = params.dt,
          .rows = static_cast<int32_t>(params.rows),
          .values = params.values,
          .conv_dim = params.conv_dim,
          .heads = params.heads};
}

cuda::KdaGatesKernelParams to_kernel(const kernels::KdaGatesParams& params) {
  return {.a_log = params.a_log,
          .dt_bias = params.dt_bias,
          .log_decay = params.log_decay,
          .beta = params.beta,
          .rows = static_cast<int32_t>(params.rows),
          .heads = params.heads,
          .key_dim = params.key_dim};
}

cuda::SiluGateKernelParams silu_gate_params(Rows x, Rows gate, Rows out, int64_t rows,
                                            int64_t width) {
  return {.x = x.floats(),
          .gate = gate.floats(),
          .out = out.data,
          .x_stride = x.stride,
          .gate_stride = gate.stride,
          .out_stride = out.stride,
          .rows = static_cast<int32_t>(rows),
          .dim = static_cast<int32_t>(width),
          .plain = 0,
          .out_is_f32 = out.dtype == DType::f32};
}

cuda::GatedNormParams gated_norm_params(const GatedNorm& norm, HeadRows x, HeadRows gate,
                                        HeadRows out, int64_t rows, int32_t heads) {
  const int32_t dim = norm.dim(heads);
  return {.x = static_cast<const float*>(x.data),
          .gate = static_cast<const float*>(gate.data),
          .out = out.data,
          .x_row_stride = x.token_stride,
          .x_head_stride = x.head_stride,
          .gate_row_stride = gate.token_stride,
          .gate_head_stride = gate.head_stride,
          .out_row_stride = out.token_stride,
          .out_head_stride = out.head_stride,
          .norm = weights_of(norm.norm),
          .weight_head_stride = norm.has_weights_of_heads() ? dim : 0,
          .gate_function = static_cast<cuda::GateFunction>(norm.gate),
          .rows = static_cast<int32_t>(rows),
          .heads = heads,
          .dim = dim};
}

cuda::DividedNormKernelParams to_kernel(const DividedNorm& step) {
  return {.x = step.x.data,
          .gate = step.gate.floats(),
          .out = step.out.data,
          .squares = step.squares,
          .x_stride = step.x.stride,
          .gate_stride = step.gate.stride,
          .out_stride = step.out.stride,
          .x_is_f32 = step.x.dtype == DType::f32,
          .norm = weights_of(step.norm),
          .rows = static_cast<int32_t>(step.rows),
          .dim = step.norm.dim(),
          .row_dim = step.norm.dim() * step.parts};
}

}  // namespace fovea
