// SPDX-License-Identifier: Apache-2.0
// The write of new keys and values to a cache, and the norm and rotation of queries, on a GPU.
#pragma once

#include "fovea/dtype.h"
#include "kernels/cuda/common/head_write_params.h"
#include "kernels/cuda/kernel.h"

namespace fovea::kernels::cuda {

// The kernel that stores rows of dtype `written` in a cache of dtype `stored`.
// Error{invalid_argument} where there is none.
gpu::KernelVariant kv_write_variant(DType written, DType stored, int sm);

class KvWrite {
 public:
  KvWrite() = default;
  // Loads the kernel onto the current GPU. Errors as Kernel's constructor.
  KvWrite(const gpu::KernelVariant& variant, gpu::KernelStore& store) : kernel_(variant, store) {}

  void run(const HeadWriteParams& params, gpu::Launcher launcher) const;

 private:
  Kernel kernel_;
};

}  // namespace fovea::kernels::cuda
