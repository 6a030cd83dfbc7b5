// SPDX-License-Identifier: Apache-2.0
// The families that latent attention on a GPU is made of. `mla` and `portable_mla` are the same
// backend over two tables.
#pragma once

#include <string_view>

#include "kernels/cuda/attention_kernel.h"
#include "kernels/cuda/mla_decode.h"

namespace fovea {

struct MlaKernels {
  std::string_view name;
  const kernels::cuda::MlaFamily* absorbed = nullptr;
  // Up-projected: attention over keys and values of every head, packed.
  const kernels::cuda::AttentionFamily* attention = nullptr;
  // On sm 90: kernels of its own multiply by the weights where they serve, else portable/head_gemm.
  bool hopper_projections = false;
};

}  // namespace fovea
