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

}  // namespace fovea
