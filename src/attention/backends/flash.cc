// SPDX-License-Identifier: Apache-2.0
// `flash`: bulk copies and warpgroup products, for Hopper.
#include "attention/backends/backends.h"
#include "attention/cuda/entry.h"
#include "gpu/architectures.h"

namespace fovea {
namespace {

std::string describe(const kernels::cuda::AttentionSetup& setup, const BatchLimits& limits) {
  std::string text = kernels::cuda::describe_hopper_decode(setup, limits);
  const std::string prefill = kernels::cuda::describe_hopper_prefill(setup, limits);
  if (!text.empty() && !prefill.empty()) text += "; ";
  return text + prefill;
}

}  // namespace

const CudaKernels& flash_kernels() {
  static const CudaKernels kernels = {.name = "flash",
                                      .prefill = &kernels::cuda::hopper_prefill(),
                                      .decode = &kernels::cuda::hopper_decode(),
                                      .groups = &kernels::cuda::hopper_groups(),
                                      .max_decode_rows = kernels::cuda::hopper_max_decode_rows,
                                      .describe = describe,
                                      .plans_jointly = true,
                                      .fp8_products = true};
  return kernels;
}

BackendEntry flash_backend() {
  Capability can = cuda_capability();
  can.min_sm = can.max_sm = gpu::kHopper;
  can.max_head_dim = 256;
  can.batch_invariant = true;  // tiles and segments of keys lie the same whatever a batch holds
  return cuda_entry(
      {.name = "flash",
       .role = "Hopper MHA and GQA: prefill by warpgroup products, decode by split keys",
       .aliases = {"fa3", "flash_attn", "flashinfer", "trtllm_mha", "fa4"}},
      flash_kernels(), can);
}

}  // namespace fovea
