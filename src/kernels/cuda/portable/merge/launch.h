// SPDX-License-Identifier: Apache-2.0
// The merge of partial results of row tiles that several blocks shared, on a GPU.
#pragma once

#include "fovea/dtype.h"
#include "kernels/cuda/common/attention_params.h"
#include "kernels/cuda/kernel.h"

namespace fovea::kernels::cuda {

// The kernel for tiles of row_tile rows and results of dtype `out`. Error{invalid_argument} where
// no kernel writes that dtype.
gpu::KernelVariant merge_variant(int32_t row_tile, DType out, int sm);

class Merge {
 public:
  Merge() = default;
  // Loads the kernel onto the current GPU. Errors as Kernel's constructor.
  Merge(const gpu::KernelVariant& variant, gpu::KernelStore& store) : kernel_(variant, store) {}

  // Enqueues the merge of what attention with these parameters left in params.work, whose kernel is
  // the preceding one in the stream.
  void run(const AttentionParams& params, gpu::Launcher launcher) const;

 private:
  Kernel kernel_;
};

}  // namespace fovea::kernels::cuda
