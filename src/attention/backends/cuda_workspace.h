// SPDX-License-Identifier: Apache-2.0
// The buffers of a backend on a GPU: page table, work list, partial results.
#pragma once

#include <cstdint>

#include "attention/backends/cuda_kernels.h"
#include "attention/workspace.h"
#include "fovea/batch.h"

namespace fovea {

// What sizes the buffers besides the limits.
struct CudaShape {
  const CudaKernels* kernels = nullptr;
  AttentionSpec spec;
  KvCacheSpec cache;
  int32_t multiprocessors = 0;
};

struct CudaBuffers {
  int32_t* page_table = nullptr;  // [max_requests, page_table_stride]; scopes with a cache
  int64_t page_table_stride = 0;
  // One plan is valid at a time, so the families' lists share their bytes.
  kernels::cuda::WorkList prefill{}, decode{};
};

CudaBuffers carve_cuda_buffers(WorkspaceCarver& workspace, const CudaShape& shape,
                               const BatchLimits& limits);

}  // namespace fovea
