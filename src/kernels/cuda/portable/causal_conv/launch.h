// SPDX-License-Identifier: Apache-2.0
// The causal convolution before a recurrence, on a GPU.
#pragma once

#include <span>
#include <vector>

#include "kernels/cuda/common/linear_params.h"
#include "kernels/cuda/kernel.h"

namespace fovea::kernels::cuda {

inline constexpr int32_t kMaxConvWidth = 8;

// Returns the kernels of a width up to kMaxConvWidth: the outputs, the windows, and both for
// requests with few tokens.
std::vector<gpu::KernelVariant> causal_conv_variants(int32_t width, int sm);

class CausalConv {
 public:
  CausalConv() = default;
  // Loads the kernels onto the current GPU. Errors as Kernel's constructor.
  CausalConv(std::span<const gpu::KernelVariant> variants, int32_t multiprocessors,
             gpu::KernelStore& store);

  // Enqueues the convolution of up to `tokens` tokens of `requests` requests. are_few: each request
  // has few. Sets vectors and tile, and clears next_waits where the next kernel finds room anyway.
  void run(CausalConvKernelParams params, int32_t requests, int32_t tokens, bool are_few,
           gpu::Launcher launcher) const;

 private:
  int32_t multiprocessors_ = 0;
  Kernel outputs_, windows_, requests_;
};

}  // namespace fovea::kernels::cuda
