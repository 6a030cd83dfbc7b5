// SPDX-License-Identifier: Apache-2.0
// Attention whose context is distributed over GPUs, see kernel.cuh.
#pragma once

#include <optional>

#include "fovea/dtype.h"
#include "kernels/cuda/common/context_params.h"
#include "kernels/cuda/kernel.h"

namespace fovea::kernels::cuda {

// Translates batches of the whole to those of a rank.
class ContextPlan {
 public:
  // Loads the kernel onto the current GPU. Errors as Kernel's constructor.
  ContextPlan(int sm, gpu::KernelStore& store);
  void run(const ContextPlanParams& params, gpu::Launcher launcher) const;

 private:
  Kernel kernel_;
};

// Exchanges queries and results. All ranks must enqueue the same calls in the same order.
class ContextMail {
 public:
  // dtype: fp16 or bf16. Loads the kernels onto the current GPU, whose blocks must all be alive at
  // the same time. Errors as Kernel's constructor.
  ContextMail(DType dtype, int sm, int multiprocessors, gpu::KernelStore& store);

  void gather(const GatherQueriesParams& params, gpu::Launcher launcher) const;
  void merge(const MergeContextParams& params, gpu::Launcher launcher) const;
  // Words of a message to one rank.
  static int64_t words(const GatherQueriesParams& params);
  static int64_t words(const MergeContextParams& params);

 private:
  uint32_t blocks(const ExchangedTokens& rows, const Kernel& kernel) const;

  Kernel queries_, states_;
  int64_t max_blocks_;
};

}  // namespace fovea::kernels::cuda
