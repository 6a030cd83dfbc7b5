// SPDX-License-Identifier: Apache-2.0
// The loaded kernels a model on a GPU is made of, besides attention and cuBLASLt.
#pragma once

#include "kernels/cuda/common/layer_params.h"
#include "kernels/cuda/kernel.h"
#include "model/device.h"

namespace fovea {

struct CudaLayerKernels {
  // For the current GPU. Errors as kernels::cuda::Kernel.
  CudaLayerKernels(int sm, gpu::KernelStore& store);

  kernels::cuda::Kernel residual, prepare_heads, gated_activation, sigmoid_gate, gather, soft_cap,
      routing, group_choices, combine;
  // [n, k] and [k, n] weights, few and many rows of an expert.
  kernels::cuda::Kernel expert_gemm_few[2], expert_gemm_many[2];
};

// CTAs of an element-wise kernel: enough to fill any GPU, which strides over the rest.
kernels::cuda::GridSize element_grid(int64_t count);

// Enqueues out[r, i] = activation(gate) * up as ModelDevice::gated_activation.
void launch_gated_activation(const CudaLayerKernels& kernels, const MlpParts& parts, Rows in,
                             Rows out, int64_t rows, Stream stream);

// Experts of one shape, in bf16. kernels outlives the result. Error{unsupported} names what
// differs.
std::unique_ptr<Experts> make_cuda_experts(std::vector<MlpParts> experts, bool weights_scale_input,
                                           const CudaLayerKernels& kernels, Stream stream);

}  // namespace fovea
