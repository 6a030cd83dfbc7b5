// SPDX-License-Identifier: Apache-2.0
// Runs a model on an NVIDIA GPU with bf16 weights and activations. Accumulators, the residual
// stream, norms and logits are f32.
#pragma once

#include <memory>

#include "model/device.h"

namespace fovea {

struct CudaDeviceOptions {
  int index = 0;
  int32_t max_rows = 1;  // rows of one pass
  // Makes the bits of a row independent of the number of rows in the pass.
  bool row_invariant = false;
  ModelRanks ranks = {};
  // Another GPU device, whose stream this one enqueues on; null: it has a stream of its own.
  std::shared_ptr<ModelDevice> stream_of = {};
};

// Throws Error{unsupported} naming what is missing: a GPU, cuBLASLt, or a kernel.
std::unique_ptr<ModelDevice> make_cuda_device(const CudaDeviceOptions& options);

}  // namespace fovea
