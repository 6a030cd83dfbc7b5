// SPDX-License-Identifier: Apache-2.0
// Page tables and cache writes of a pass on a GPU, the same for every kind of softmax attention.
#pragma once

#include "attention/cuda/layer.h"
#include "core/workspace_carver.h"
#include "fovea/attention_backend.h"
#include "kernels/cuda/common/plan_kernel_params.h"
#include "kernels/cuda/portable/kv_write/launch.h"

namespace fovea {

// In device memory: [max_requests, stride], rows of page ids.
struct CudaPages {
  int32_t* table = nullptr;
  int64_t stride = 0;
};

class CudaCache {
 public:
  CudaCache() = default;
  // For the current GPU; `pool` outlives it. Errors as kernels::cuda::Kernel.
  CudaCache(const AttentionSpec& spec, const KvPool& pool, int sm, gpu::KernelStore& store);

  // Room for the page table of any batch within the limits.
  static CudaPages carve(WorkspaceCarver& workspace, const AttentionSpec& spec, int32_t page_size,
                         const BatchLimits& limits);
  // Returns the parameters with which a plan's launch writes the page table of `batch`, whose
  // requests have `kv_lens` keys.
  kernels::cuda::TableWriteParams page_table(const BatchView& batch, const int32_t* kv_lens,
                                             const CudaPages& pages) const;
  // Launches the kernel that stores a layer's new k and v, if it has any, and norms and rotates q
  // if the spec has_rope. `layer` holds the layer's own parameters.
  void store(const LayerTensors& tensors, kernels::cuda::KvWriteParams layer,
             const BatchView& batch, gpu::Launcher launcher) const;

 private:
  AttentionSpec spec_;
  const KvPool* pool_ = nullptr;
  kernels::cuda::KvWrite kv_write_;
};

}  // namespace fovea
