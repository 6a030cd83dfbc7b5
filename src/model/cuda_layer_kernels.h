// SPDX-License-Identifier: Apache-2.0
// The loaded kernels of a model on a GPU, besides attention and cuBLASLt.
#pragma once

#include "kernels/cuda/portable/expert_gemm/launch.h"
#include "kernels/cuda/portable/layer_ops/launch.h"
#include "model/device.h"

namespace fovea {

struct CudaLayerKernels {
  // Loads the kernels onto the current GPU. Errors as kernels::cuda::Kernel.
  CudaLayerKernels(int sm, gpu::KernelStore& store) : ops(sm, store), expert_gemm(sm, store) {}

  kernels::cuda::LayerOps ops;
  kernels::cuda::ExpertGemm expert_gemm;
};

// Enqueues out[r, i] = activation(gate) * up as ModelDevice::gated_activation.
void launch_gated_activation(const kernels::cuda::LayerOps& ops, const MlpParts& parts, Rows in,
                             Rows out, int64_t rows, Stream stream);

// Experts of one shape, in bf16. kernels outlives the result. Error{unsupported} names what
// differs.
std::unique_ptr<Experts> make_cuda_experts(std::vector<MlpParts> experts, bool weights_scale_input,
                                           const CudaLayerKernels& kernels, Stream stream);

}  // namespace fovea
