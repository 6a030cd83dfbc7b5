// SPDX-License-Identifier: Apache-2.0
// The operations of kernels/drafts.h on a GPU.
#pragma once

#include "kernels/cuda/kernel.h"
#include "kernels/drafts.h"

namespace fovea::kernels::cuda {

class DraftKernels {
 public:
  // Loads every kernel onto the current GPU. Errors as Kernel's constructor.
  DraftKernels(int sm, gpu::KernelStore& store);

  // Each enqueues one kernel.
  void describe(const DescribeDraftsParams& params, gpu::Launcher launcher) const;
  void accept(const AcceptTokensParams& params, gpu::Launcher launcher) const;
  void accept(const AcceptSampledParams& params, int32_t multiprocessors,
              gpu::Launcher launcher) const;
  void commit(const CommitDraftsParams& params, gpu::Launcher launcher) const;

 private:
  Kernel describe_, accept_tokens_, accept_sampled_, commit_;
};

}  // namespace fovea::kernels::cuda
