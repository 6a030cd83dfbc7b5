// SPDX-License-Identifier: Apache-2.0
// Merges of two attention states on a GPU: results over different keys, with their log-sum-exps.
#pragma once

#include "fovea/dtype.h"
#include "kernels/cuda/common/merge_states_params.h"
#include "kernels/cuda/kernel.h"

namespace fovea::kernels::cuda {

// Returns the kernel for results of this dtype. Error{invalid_argument} where there is none.
gpu::KernelVariant merge_states_variant(DType dtype, int sm);

class MergeStates {
 public:
  MergeStates() = default;
  // Loads the kernel onto the current GPU. Errors as Kernel's constructor.
  MergeStates(DType dtype, int sm, gpu::KernelStore& store);

  // Enqueues the merge.
  void run(const MergeStatesParams& params, gpu::Launcher launcher) const;
  // Enqueues the merge so that it may start before the preceding kernel has ended, with a bounded
  // number of blocks.
  void run_overlapped(const MergeStatesParams& params, gpu::Launcher launcher) const;

 private:
  int64_t blocks(const MergeStatesParams& params) const;

  Kernel kernel_;
};

}  // namespace fovea::kernels::cuda
