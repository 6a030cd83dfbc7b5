// SPDX-License-Identifier: Apache-2.0
// The kernel families of a backend on a GPU. `portable` and `flash` are the same backend with two
// such tables.
#pragma once

#include <string>
#include <string_view>

#include "kernels/cuda/attention_kernel.h"

namespace fovea {

struct CudaKernels {
  std::string_view name;
  const kernels::cuda::AttentionFamily* prefill = nullptr;  // serves any batch
  // Serves any batch too. It is chosen if no request has more packed (token, q head of a group)
  // rows than its row_tile; in mixed batches it serves these requests while prefill serves the
  // others. Null: prefill serves all requests.
  const kernels::cuda::AttentionFamily* decode = nullptr;
  // Attends to shared prefixes: many rows over split keys, with results in f32.
  const kernels::cuda::AttentionFamily* groups = nullptr;
  // Packed rows of a request up to which decode serves a batch that is neither mixed nor shares
  // prefixes; null: decode's row_tile.
  int32_t (*max_decode_rows)(const kernels::cuda::AttentionSetup& setup) = nullptr;
  // For explain(): what the families choose for batches within the limits; or null.
  std::string (*describe)(const kernels::cuda::AttentionSetup& setup,
                          const BatchLimits& limits) = nullptr;
  // Several plans of a pass take one launch, instead of one each.
  bool plans_jointly = false;
  // fp8 queries are multiplied as fp8: keys cannot have a scale each, and head_dim is at most 128.
  bool fp8_products = false;

  // Returns the decode family, or null if prefill serves all batches of the setup.
  const kernels::cuda::AttentionFamily* decode_of(const kernels::cuda::AttentionSetup& setup) const;
};

}  // namespace fovea
