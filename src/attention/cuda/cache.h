// SPDX-License-Identifier: Apache-2.0
// The cache side of a GPU backend's pass: page tables and writes, the same for every kind of
// softmax attention.
#pragma once

#include "attention/cuda/layer.h"
#include "core/workspace_carver.h"
#include "fovea/attention_backend.h"
#include "kernels/cuda/common/plan_launch.h"
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
  // What a plan's launch needs to write the rows of `batch`, of layers with `kv_lens` keys.
  kernels::cuda::TableWriteParams page_table(const BatchView& batch, const int32_t* kv_lens,
                                             const CudaPages& pages) const;
  // Enqueues the write of a layer's new k and v, where there are any to store, and with has_rope
  // the rotation of q. `layer` is the layer's part of the parameters.
  void store(const LayerTensors& tensors, kernels::cuda::KvWriteParams layer,
             const BatchView& batch, Stream stream) const;

 private:
  AttentionSpec spec_;
  const KvPool* pool_ = nullptr;
  kernels::cuda::KvWrite kv_write_;
};

}  // namespace fovea
