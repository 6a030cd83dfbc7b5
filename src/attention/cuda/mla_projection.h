// SPDX-License-Identifier: Apache-2.0
// Computes keys and values of every head from rows of latents, for the up-projected form of MLA on
// a GPU: by sm90/mla_project if it serves the dims, by head_gemm otherwise.
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
  // Returns true if latents of dtype `stored` are read from their pages by
  // MlaProjectTensors::offsets, false if they come as dense rows.
  static bool gathers(const MlaKernels& kernels, const AttentionSpec& spec, DType stored,
                      const DeviceInfo& device);
  // Returns the kernels that the constructor takes from the store.
  static std::vector<gpu::KernelVariant> variants(const MlaKernels& kernels,
                                                  const AttentionSpec& spec, DType stored,
                                                  const DeviceInfo& device);

  MlaProjection(const MlaKernels& kernels, const AttentionSpec& spec, DType stored,
                const DeviceInfo& device, gpu::KernelStore& store);

  // Launches the products; legal in a capture.
  void run(const kernels::cuda::MlaProjectTensors& tensors, gpu::Launcher launcher) const;

 private:
  AttentionSpec spec_;
  std::optional<kernels::cuda::MlaProject> project_;
  kernels::cuda::HeadGemm head_gemm_;  // without it
};

}  // namespace fovea
