// SPDX-License-Identifier: Apache-2.0
// The families a backend on a GPU is made of. `portable` and `flash` are the same backend over two
// tables.
#pragma once

#include <string_view>

#include "kernels/cuda/attention_kernel.h"

namespace fovea {

struct CudaKernels {
  std::string_view name;
  // Serves any batch.
  const kernels::cuda::AttentionFamily* prefill = nullptr;
  // Serves any batch too, and is chosen where no request has more than its row_tile packed (token,
  // q head of a group) rows. Null: prefill serves all.
  const kernels::cuda::AttentionFamily* decode = nullptr;
};

// The tables, defined beside the rows that use them.
const CudaKernels& flash_kernels();
const CudaKernels& portable_kernels();

}  // namespace fovea
