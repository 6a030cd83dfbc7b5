// SPDX-License-Identifier: Apache-2.0
// The kernel families of latent attention on a GPU. `mla` and `portable_mla` are the same backend
// with two such tables.
#pragma once

#include <string_view>

#include "kernels/cuda/attention_kernel.h"
#include "kernels/cuda/mla_decode.h"

namespace fovea {

struct MlaKernels {
  std::string_view name;
  const kernels::cuda::MlaFamily* absorbed = nullptr;
  // The up-projected form: attention over packed keys and values of every head.
  const kernels::cuda::AttentionFamily* attention = nullptr;
  // On sm 90, sm90/mla_project and sm90/head_gemm multiply by the weights if they serve the layer,
  // portable/head_gemm otherwise.
  bool hopper_projections = false;
};

}  // namespace fovea
