// SPDX-License-Identifier: Apache-2.0
// Attention in several passes over disjoint keys, joined by LSE.
#pragma once

#include "attention/host/backend.h"

namespace fovea {

class HostPassStates {
 public:
  // Takes buffers for up to `passes` passes over batches of up to `tokens` tokens.
  void carve(WorkspaceCarver& workspace, const HostShape& shape,
             const HostKernels::Shape& kernel_shape, int32_t passes, int64_t tokens);

  // Runs pass `pass` of a batch. Its results stay here until join(), and those of `params` are not
  // written.
  void run(int32_t pass, kernels::AttentionParams params, const HostKernels::Schedule& schedule,
           ThreadPool& threads) const;
  // Writes the results of `params`, joined from the first `passes` passes.
  void join(int32_t passes, const kernels::AttentionParams& params, ThreadPool& threads) const;

 private:
  const HostKernels* kernels_ = nullptr;
  HostKernels::Shape shape_;
  int64_t rows_ = 0;      // (token, q head) pairs of a pass, at most
  float* out_ = nullptr;  // [passes, rows, head_dim_v]
  float* lse_ = nullptr;  // [passes, rows]
};

}  // namespace fovea
