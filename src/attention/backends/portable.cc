// SPDX-License-Identifier: Apache-2.0
// `portable`: mma.sync and cp.async, for any NVIDIA GPU from Ampere.
#include "attention/backends/backends.h"
#include "attention/cuda/entry.h"

namespace fovea {

const CudaKernels& portable_kernels() {
  static const CudaKernels kernels = {.name = "portable",
                                      .prefill = &kernels::cuda::portable_prefill(),
                                      .decode = &kernels::cuda::portable_decode(),
                                      .groups = &kernels::cuda::portable_prefill()};
  return kernels;
}

BackendEntry portable_backend() {
  Capability can = cuda_capability();
  can.min_sm = 80;
  can.max_head_dim = 256;
  can.batch_invariant = true;
  return cuda_entry({.name = "portable",
                     .role = "MHA and GQA on any NVIDIA GPU from Ampere",
                     .aliases = {"triton", "triton_attn", "fa2", "flex", "flex_attention"},
                     .stands_in_for = "flash"},
                    portable_kernels(), can);
}

}  // namespace fovea
