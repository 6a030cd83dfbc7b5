// SPDX-License-Identifier: Apache-2.0
// Draws of next tokens from logits on a GPU.
#pragma once

#include "kernels/cuda/common/sampling_params.h"
#include "kernels/cuda/kernel.h"

namespace fovea::kernels::cuda {

class Sampling {
 public:
  // Loads the kernel onto the current GPU. Errors as Kernel's constructor.
  Sampling(int sm, gpu::KernelStore& store);

  // Enqueues params.draws[0, draws).
  void draw(const DrawParams& params, int32_t draws, Stream stream) const;

 private:
  Kernel kernel_;
};

}  // namespace fovea::kernels::cuda
