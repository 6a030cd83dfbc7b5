// SPDX-License-Identifier: Apache-2.0
// Loads all kernels of a model on a GPU except attention and cuBLASLt.
#pragma once

#include "kernels/cuda/portable/expert_gemm/launch.h"
#include "kernels/cuda/portable/layer_ops/launch.h"
#include "kernels/cuda/portable/skinny_gemm/launch.h"
#include "kernels/cuda/sm90/narrow_gemm/launch.h"
#include "kernels/cuda/sm90/skinny_experts/launch.h"
#include "model/device.h"

namespace fovea {

struct CudaLayerKernels {
  // Loads the kernels for the current GPU. Throws as kernels::cuda::Kernel does.
  CudaLayerKernels(int sm, gpu::KernelStore& store)
      : ops(sm, store),
        expert_gemm(sm, store),
        skinny_experts(sm, store),
        skinny(sm, store),
        narrow(sm, store) {}

  // Returns true if multiply_few_rows() computes such a product.
  bool serves_few_rows(const kernels::cuda::SkinnyGemmParams& params) const;
  void multiply_few_rows(const kernels::cuda::SkinnyGemmParams& params, Stream stream) const;

  kernels::cuda::LayerOps ops;
  kernels::cuda::ExpertGemm expert_gemm;
  kernels::cuda::ExpertProducts skinny_experts;
  kernels::cuda::SkinnyProducts skinny;
  kernels::cuda::NarrowProducts narrow;
};

kernels::cuda::NormWeights weights_of(const Norm& norm);

// Returns the bias in the type of the output: vectors are placed in f32, then in bf16.
const void* bias_of(const Linear& weights, DType out);

// Describes out = x weights^T + bias, see ModelDevice::linear.
kernels::cuda::SkinnyGemmParams skinny_params(const Linear& weights, Rows x, Rows out,
                                              int64_t rows);
// Describes such a product with the steps around it, see ModelDevice::joined_linear.
kernels::cuda::SkinnyGemmParams joined_params(const Linear& weights, const JoinedSteps& steps,
                                              Rows x, Rows out, int64_t rows);
// Describes out = activation(gate(x)) * up(x), see ModelDevice::gated_linear.
kernels::cuda::SkinnyGemmParams gated_params(const MlpParts& parts, const DeferredNorm& norm,
                                             Rows x, Rows out, int64_t rows);

bool has_steps(const HeadSteps& steps);
// Describes the steps of a set of heads. Throws Error{unsupported} if they are too long for them.
kernels::cuda::HeadsParams heads_params(const HeadSet& set, int64_t rows, int32_t dim,
                                        const int32_t* positions);

// Describes the norm of heads with a gate, see ModelDevice::gated_norm.
kernels::cuda::GatedNormParams gated_norm_params(const GatedNorm& norm, HeadRows x, HeadRows gate,
                                                 HeadRows out, int64_t rows, int32_t heads);

// Describes out = x * silu(gate), see ModelDevice::silu_gate.
kernels::cuda::SiluGateKernelParams silu_gate_params(Rows x, Rows gate, Rows out, int64_t rows,
                                                     int64_t width);

// Describe divided norms, the routing of experts, and the inputs of linear layers to their kernels.
kernels::cuda::DividedNormKernelParams to_kernel(const DividedNorm& step);
kernels::cuda::RoutingParams to_kernel(const kernels::MoeRoutingParams& routing);
kernels::cuda::DeltaInputsKernelParams to_kernel(const kernels::DeltaInputsParams& params);
kernels::cuda::Mamba2InputsKernelParams to_kernel(const kernels::Mamba2InputsParams& params);
kernels::cuda::KdaGatesKernelParams to_kernel(const kernels::KdaGatesParams& params);

// Enqueues out[r, i] = activation(gate) * up, see ModelDevice::gated_activation.
void launch_gated_activation(const kernels::cuda::LayerOps& ops, const MlpParts& parts, Rows in,
                             Rows out, int64_t rows, Stream stream);

// Makes experts of one shape with bf16 weights. With row_invariant, a row has the same bits among
// any number of rows. `kernels` must outlive the result. Throws Error{unsupported} naming the
// difference if shapes differ.
std::unique_ptr<Experts> make_cuda_experts(std::vector<MlpParts> experts, bool weights_scale_input,
                                           bool row_invariant, const CudaLayerKernels& kernels,
                                           Stream stream);

}  // namespace fovea
