// SPDX-License-Identifier: Apache-2.0
// The causal convolution before a recurrence, on a GPU.
#pragma once

#include <span>
#include <vector>

#include "kernels/cuda/common/linear_params.h"
#include "kernels/cuda/kernel.h"

namespace fovea::kernels::cuda {

inline constexpr int32_t kMaxConvWidth = 8;

// Returns the kernels of a width up to kMaxConvWidth: the outputs, then the windows.
std::vector<gpu::KernelVariant> causal_conv_variants(int32_t width, int sm);

class CausalConv {
 public:
  CausalConv() = default;
  // Loads both kernels onto the current GPU. Errors as Kernel's constructor.
  CausalConv(std::span<const gpu::KernelVariant> variants, gpu::KernelStore& store);

  // Enqueues the convolution of up to `tokens` tokens of `requests` requests. one_token: no request
  // has more than one. Sets tile and keeps_windows.
  void run(CausalConvKernelParams params, int32_t requests, int32_t tokens, bool one_token,
           gpu::Launcher launcher) const;

 private:
  Kernel outputs_, windows_;
};

}  // namespace fovea::kernels::cuda
