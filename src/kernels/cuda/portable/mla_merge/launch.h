// SPDX-License-Identifier: Apache-2.0
// The merge of MLA decode's partial results.
#pragma once

#include "fovea/dtype.h"
#include "kernels/cuda/common/mla_params.h"
#include "kernels/cuda/kernel.h"

namespace fovea::kernels::cuda {

struct MlaMergeSetup {
  int32_t row_tile = 0, rank = 0;
  DType out = DType::bf16;
  DType parts = DType::f32;  // dtype of MlaWorkList::partial_out: f32, or f16 on sm 90
  int sm = 0;
  int32_t multiprocessors = 0;
};

gpu::KernelVariant mla_merge_variant(const MlaMergeSetup& setup);

class MlaMergeKernel {
 public:
  MlaMergeKernel() = default;
  // Loads the kernel onto the current GPU. Errors as Kernel's constructor.
  MlaMergeKernel(const MlaMergeSetup& setup, gpu::KernelStore& store)
      : kernel_(mla_merge_variant(setup), store), multiprocessors_(setup.multiprocessors) {}

  // Enqueues the merge of what the preceding kernel in the stream leaves in params.work.
  void run(const MlaMergeParams& params, gpu::Launcher launcher) const;

 private:
  Kernel kernel_;
  int32_t multiprocessors_ = 0;
};

}  // namespace fovea::kernels::cuda
