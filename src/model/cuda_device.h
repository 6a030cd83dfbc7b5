// SPDX-License-Identifier: Apache-2.0
// A model on an NVIDIA GPU: bf16 weights and activations, f32 accumulators, residual stream, norms
// and logits.
#pragma once

#include <memory>

#include "model/device.h"

namespace fovea {

struct CudaDeviceOptions {
  int index = 0;
  int32_t max_rows = 1;        // of one pass
  bool row_invariant = false;  // a row's bits do not depend on how many rows a pass has
};

// Error{unsupported} without a GPU, cuBLASLt or one of the kernels, saying which.
std::unique_ptr<ModelDevice> make_cuda_device(const CudaDeviceOptions& options);

}  // namespace fovea
