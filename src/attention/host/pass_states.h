// SPDX-License-Identifier: Apache-2.0
// Attention in several passes over keys that no two of them share, joined by LSE.
#pragma once

#include "attention/host/backend.h"

namespace fovea {

class HostPassStates {
 public:
  // Of up to `passes` passes over batches of up to `tokens` tokens.
  void carve(WorkspaceCarver& workspace, const HostShape& shape,
             const HostKernels::Shape& kernel_shape, int32_t passes, int64_t tokens);

  // Pass `pass` of a batch. Of `params` the results are left out: they stay here until join().
  void run(int32_t pass, kernels::AttentionParams params, const HostKernels::Schedule& schedule,
           ThreadPool& threads) const;
  // Writes the results of `params` from those of the first `passes` passes.
  void join(int32_t passes, const kernels::AttentionParams& params, ThreadPool& threads) const;

 private:
  const HostKernels* kernels_ = nullptr;
  HostKernels::Shape shape_;
  int64_t rows_ = 0;      // (token, q head) pairs of a pass at most
  float* out_ = nullptr;  // [passes, rows, head_dim_v]
  float* lse_ = nullptr;  // [passes, rows]
};

}  // namespace fovea
