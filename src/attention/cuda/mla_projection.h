// SPDX-License-Identifier: Apache-2.0
// Keys and values of every head from rows of latents, for the up-projected form of MLA on a GPU: by
// sm90/mla_project where it is there and serves the dims, else by head_gemm.
#pragma once

#include <optional>
#include <vector>

#include "attention/cuda/mla_kernels.h"
#include "fovea/attention_spec.h"
#include "fovea/device.h"
#include "kernels/cuda/head_gemm.h"
#include "kernels/cuda/mla_project.h"

namespace fovea {

class MlaProjection {
 public:
  // Over a cache of `stored`: whether latents are read where they lie, by
  // MlaProjectTensors::offsets. Else they come as dense rows.
  static bool gathers(const MlaKernels& kernels, const AttentionSpec& spec, DType stored,
                      const DeviceInfo& device);
  // What the constructor takes from the store.
  static std::vector<gpu::KernelVariant> variants(const MlaKernels& kernels,
                                                  const AttentionSpec& spec, DType stored,
                                                  const DeviceInfo& device);

  MlaProjection(const MlaKernels& kernels, const AttentionSpec& spec, DType stored,
                const DeviceInfo& device, gpu::KernelStore& store);

  // Enqueues the products; legal in a capture.
  void run(const kernels::cuda::MlaProjectTensors& tensors, Stream stream) const;

 private:
  AttentionSpec spec_;
  std::optional<kernels::cuda::MlaProject> project_;
  kernels::cuda::HeadGemm head_gemm_;  // without it
};

}  // namespace fovea
