// SPDX-License-Identifier: Apache-2.0
// The steps around the products and attention of up-projected MLA, on a GPU.
#pragma once

#include <vector>

#include "fovea/dtype.h"
#include "kernels/cuda/common/mla_prefill_params.h"
#include "kernels/cuda/kernel.h"

namespace fovea::kernels::cuda {

class MlaPrefillSteps {
 public:
  // Returns what the constructor takes from the store. `stored` is the dtype of the cache,
  // `multiplied` that of queries and gathered rows.
  static std::vector<gpu::KernelVariant> variants(DType stored, DType multiplied, int sm);
  // Loads the kernels onto the current GPU. Errors as Kernel's constructor.
  MlaPrefillSteps(DType stored, DType multiplied, int sm, gpu::KernelStore& store);

  // Each enqueues one launch; legal in a capture.
  void choose_forms(const MlaFormsParams& params, gpu::Launcher launcher) const;
  void gather(const MlaGatherParams& params, gpu::Launcher launcher) const;
  void join_queries(const MlaJoinParams& params, gpu::Launcher launcher) const;

 private:
  Kernel forms_, gather_, join_;
};

}  // namespace fovea::kernels::cuda
