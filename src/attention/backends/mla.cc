// SPDX-License-Identifier: Apache-2.0
// `mla`: multi-head latent attention on Hopper; `portable_mla`: on any NVIDIA GPU from Ampere.
#include "attention/backends/backends.h"
#include "attention/cuda/mla_entry.h"
#include "gpu/architectures.h"

namespace fovea {
namespace {

constexpr KvScale kKvScales[] = {KvScale::none, KvScale::per_tensor};

Capability hopper_capability() {
  Capability can = mla_capability();
  can.min_sm = can.max_sm = gpu::kHopper;
  can.kv_scales = kKvScales;
  return can;
}

Capability portable_capability() {
  Capability can = mla_capability();
  can.min_sm = gpu::kAmpere;
  can.window = true;
  return can;
}

}  // namespace

const MlaKernels& mla_kernels() {
  static const MlaKernels kernels = {.name = "mla",
                                     .absorbed = &kernels::cuda::hopper_mla(),
                                     .attention = &kernels::cuda::hopper_prefill(),
                                     .hopper_projections = true};
  return kernels;
}

const MlaKernels& portable_mla_kernels() {
  static const MlaKernels kernels = {.name = "portable_mla",
                                     .absorbed = &kernels::cuda::portable_mla(),
                                     .attention = &kernels::cuda::portable_prefill()};
  return kernels;
}

BackendEntry mla_backend() {
  return mla_entry(
      {.role =
           "Hopper MLA: absorbed over the latent cache, long extends up-projected to full heads",
       .aliases = {"flashmla", "cutlass_mla", "flashinfer_mla", "trtllm_mla", "flash_attn_mla"}},
      mla_kernels(), hopper_capability());
}

BackendEntry portable_mla_backend() {
  return mla_entry({.role = "MLA on any NVIDIA GPU from Ampere, in the same two forms",
                    .aliases = {"triton_mla"},
                    .stands_in_for = "mla"},
                   portable_mla_kernels(), portable_capability());
}

}  // namespace fovea
