// SPDX-License-Identifier: Apache-2.0
// Copies between pools with other pages, see kernel.cuh.
#pragma once

#include "kernels/cuda/common/page_copy_params.h"
#include "kernels/cuda/kernel.h"

namespace fovea::kernels::cuda {

class PageCopy {
 public:
  PageCopy() = default;
  // Loads the kernel onto the current GPU. Errors as Kernel's constructor.
  PageCopy(int sm, gpu::KernelStore& store);
  // Enqueues the copy of `arrays` arrays.
  void run(const PageCopyParams& params, int arrays, gpu::Launcher launcher) const;

 private:
  Kernel kernel_;
};

}  // namespace fovea::kernels::cuda
