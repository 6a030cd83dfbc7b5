// SPDX-License-Identifier: Apache-2.0
// The join of attention to shared prefixes with attention to the other keys, on a GPU.
#pragma once

#include "fovea/dtype.h"
#include "kernels/cuda/common/prefix_params.h"
#include "kernels/cuda/kernel.h"

namespace fovea::kernels::cuda {

// The kernel for results of dtype `out`. Error{invalid_argument} where no kernel writes that dtype.
gpu::KernelVariant prefix_join_variant(DType out, int sm);

class PrefixJoin {
 public:
  PrefixJoin() = default;
  // Loads the kernel onto the current GPU. Errors as Kernel's constructor.
  PrefixJoin(const gpu::KernelVariant& variant, gpu::KernelStore& store)
      : kernel_(variant, store) {}

  // Enqueues the join, which reads what the preceding kernels in the stream have written.
  void run(const PrefixJoinParams& params, gpu::Launcher launcher) const;

 private:
  Kernel kernel_;
};

}  // namespace fovea::kernels::cuda
