// SPDX-License-Identifier: Apache-2.0
// The families a backend on a GPU is made of. `portable` and `flash` are the same backend over two
// tables.
#pragma once

#include <string_view>

#include "kernels/cuda/attention_kernel.h"

namespace fovea {

struct CudaKernels {
  std::string_view name;
  const kernels::cuda::AttentionFamily* prefill = nullptr;  // serves any batch
  // Serves any batch too, and is chosen where no request has more than its row_tile packed (token,
  // q head of a group) rows; in mixed batches it serves such requests while prefill serves the
  // others. Null: prefill serves all.
  const kernels::cuda::AttentionFamily* decode = nullptr;
  // Attends to shared prefixes: many rows over keys that it splits, results in f32.
  const kernels::cuda::AttentionFamily* groups = nullptr;
  // Plans several of these in one launch; without it they are launched one behind the other.
  bool plans_jointly = false;
  // fp8 queries are multiplied as fp8: keys cannot have a scale each, heads are 128 wide at most.
  bool fp8_products = false;

  // Null: prefill serves all batches of the setup.
  const kernels::cuda::AttentionFamily* decode_of(const kernels::cuda::AttentionSetup& setup) const;
};

}  // namespace fovea
