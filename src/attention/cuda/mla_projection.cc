// SPDX-License-Identifier: Apache-2.0
#include "attention/cuda/mla_projection.h"

#include "attention/cuda/mla_layer.h"

namespace fovea {
namespace {

namespace cuda = kernels::cuda;

// Returns nothing if the device has no sm90/mla_project or the kernel does not serve these dims.
std::optional<cuda::MlaProjectSetup> project_setup(const MlaKernels& kernels,
                                                   const AttentionSpec& spec, DType stored,
                                                   const DeviceInfo& device) {
  const cuda::MlaProjectSetup setup = {.rank = spec.mla.kv_lora_rank,
                                       .nope_dim = spec.mla.nope_dim,
                                       .v_dim = spec.mla.v_dim,
                                       .dtype = spec.q_dtype,
                                       .sm = device.sm,
                                       .multiprocessors = device.cores,
                                       .gathers = !is_fp8(stored)};
  if (!kernels.hopper_projections || !cuda::MlaProject::serves(setup)) return std::nullopt;
  return setup;
}

}  // namespace

bool MlaProjection::gathers(const MlaKernels& kernels, const AttentionSpec& spec, DType stored,
                            const DeviceInfo& device) {
  const auto setup = project_setup(kernels, spec, stored, device);
  return setup && setup->gathers;
}

std::vector<gpu::KernelVariant> MlaProjection::variants(const MlaKernels& kernels,
                                                        const AttentionSpec& spec, DType stored,
                                                        const DeviceInfo& device) {
  const auto setup = project_setup(kernels, spec, stored, device);
  if (setup) return cuda::MlaProject::variants(*setup);
  return cuda::HeadGemm::variants(mla_weights_setup(cuda::WeightOrder::nk, kernels, spec, device));
}

MlaProjection::MlaProjection(const MlaKernels& kernels, const AttentionSpec& spec, DType stored,
                             const DeviceInfo& device, gpu::KernelStore& store)
    : spec_(spec) {
  if (const auto setup = project_setup(kernels, spec, stored, device)) {
    project_.emplace(*setup, store);
  } else {
    head_gemm_ =
        cuda::HeadGemm(mla_weights_setup(cuda::WeightOrder::nk, kernels, spec, device), store);
  }
}

void MlaProjection::run(const cuda::MlaProjectTensors& tensors, gpu::Launcher launcher) const {
  if (project_) return project_->run(tensors, launcher);
  cuda::HeadGemmParams params{};
  params.x = tensors.latents;
  params.x_token_stride = tensors.latents_row_stride;
  params.weight_row_stride = spec_.mla.kv_lora_rank;
  params.live_tokens = tensors.live_rows;
  params.tokens = tensors.rows;
  params.k = spec_.mla.kv_lora_rank;
  params.heads = tensors.heads;
  params.weight = tensors.w_uk;
  params.weight_head_stride = tensors.w_uk_head_stride;
  params.n = spec_.mla.nope_dim;
  params.out = tensors.keys;
  params.out_token_stride = tensors.keys_token_stride;
  params.out_head_stride = tensors.keys_head_stride;
  head_gemm_.run(params, launcher);
  params.weight = tensors.w_uv;
  params.weight_head_stride = tensors.w_uv_head_stride;
  params.n = spec_.mla.v_dim;
  params.out = tensors.values;
  params.out_token_stride = tensors.values_token_stride;
  params.out_head_stride = tensors.values_head_stride;
  head_gemm_.run(params, launcher);
}

}  // namespace fovea
