// SPDX-License-Identifier: Apache-2.0
// Sums over the GPUs of a process, see kernel.cuh.
#pragma once

#include "kernels/cuda/common/rank_sum_params.h"
#include "kernels/cuda/kernel.h"

namespace fovea::kernels::cuda {

class RankSum {
 public:
  static constexpr int32_t kMaxDim = 8192;  // a row that a block of 512 threads keeps

  // Loads the kernels onto the current GPU. Errors as Kernel's constructor.
  RankSum(int sm, gpu::KernelStore& store);

  // Return true if a sum fits into a message and its arrays are aligned.
  static bool serves(const SumResidualParams& params);
  static bool serves(const SumValuesParams& params);

  // Each enqueues a sum that is served. All ranks must enqueue the same sums in the same order.
  void add(const SumResidualParams& params, Stream stream) const;
  void sum(const SumValuesParams& params, Stream stream) const;

 private:
  Kernel values_, residual_, long_residual_;
};

}  // namespace fovea::kernels::cuda
