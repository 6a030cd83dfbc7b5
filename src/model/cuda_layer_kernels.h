// SPDX-License-Identifier: Apache-2.0
// Loads all kernels of a model on a GPU except attention and cuBLASLt.
#pragma once

#include "kernels/cuda/portable/expert_gemm/launch.h"
#include "kernels/cuda/portable/layer_ops/launch.h"
#include "model/device.h"

namespace fovea {

struct CudaLayerKernels {
  // Loads the kernels for the current GPU. Throws as kernels::cuda::Kernel does.
  CudaLayerKernels(int sm, gpu::KernelStore& store) : ops(sm, store), expert_gemm(sm, store) {}

  kernels::cuda::LayerOps ops;
  kernels::cuda::ExpertGemm expert_gemm;
};

// Enqueues out[r, i] = activation(gate) * up, see ModelDevice::gated_activation.
void launch_gated_activation(const kernels::cuda::LayerOps& ops, const MlpParts& parts, Rows in,
                             Rows out, int64_t rows, Stream stream);

// Makes experts of one shape with bf16 weights. `kernels` must outlive the result. Throws
// Error{unsupported} naming the difference if shapes differ.
std::unique_ptr<Experts> make_cuda_experts(std::vector<MlpParts> experts, bool weights_scale_input,
                                           const CudaLayerKernels& kernels, Stream stream);

}  // namespace fovea
