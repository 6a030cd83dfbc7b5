// SPDX-License-Identifier: Apache-2.0
// Copies between pools with other pages, see kernel.cuh.
#pragma once

#include "kernels/cuda/common/page_copy_params.h"
#include "kernels/cuda/kernel.h"

namespace fovea::kernels::cuda {

class PageCopy {
 public:
  PageCopy() = default;
  // Loads the kernels onto the current GPU. Errors as Kernel's constructor.
  PageCopy(int sm, gpu::KernelStore& store);
  // Enqueue the copy, or the conversion, of `arrays` arrays.
  void copy(const PageCopyParams& params, int arrays, gpu::Launcher launcher) const;
  void convert(const PageConvertParams& params, int arrays, gpu::Launcher launcher) const;

 private:
  Kernel rows_, values_;
};

}  // namespace fovea::kernels::cuda
