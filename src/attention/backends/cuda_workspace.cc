// SPDX-License-Identifier: Apache-2.0
#include "attention/backends/cuda_workspace.h"

#include <algorithm>

#include "attention/validate_spec.h"

namespace fovea {
namespace {

namespace cuda = kernels::cuda;

// Row tiles of a batch: sum over requests of ceil(rows / row_tile). Every request with rows adds
// less than one tile to the batch's rows / row_tile.
int64_t most_tiles(const CudaShape& shape, const BatchLimits& limits, int32_t row_tile) {
  const int64_t group = shape.spec.q_heads / shape.spec.kv_heads;
  const int64_t filled = std::min(limits.max_requests, limits.max_tokens);
  return (limits.max_tokens * group + filled * (row_tile - 1)) / row_tile;
}

cuda::WorkList carve_work_list(WorkspaceCarver& workspace, const CudaShape& shape,
                               const BatchLimits& limits, const cuda::AttentionFamily& family) {
  cuda::WorkList work{};
  work.ctas = shape.multiprocessors * family.blocks_per_sm;
  const int64_t tiles = most_tiles(shape, limits, family.row_tile);
  const int64_t partial_rows = 2 * int64_t{work.ctas} * family.row_tile;
  work.items = workspace.take<cuda::WorkItem>(tiles * shape.spec.kv_heads + work.ctas);
  work.cta_begin = workspace.take<int32_t>(work.ctas);
  work.cta_end = workspace.take<int32_t>(work.ctas);
  work.merges = workspace.take<cuda::MergeItem>(work.ctas);
  work.tile_indptr = workspace.take<int32_t>(int64_t{limits.max_requests} + 1);
  work.partial_out = workspace.take<float>(partial_rows * shape.spec.head_dim_v);
  work.partial_lse = workspace.take<float>(partial_rows);
  return work;
}

// The most keys one request can have.
int64_t max_keys(const AttentionSpec& spec, const BatchLimits& limits) {
  return spec.scope == AttentionScope::cross ? limits.max_encoder_len : limits.max_kv_len;
}

}  // namespace

CudaBuffers carve_cuda_buffers(WorkspaceCarver& workspace, const CudaShape& shape,
                               const BatchLimits& limits) {
  CudaBuffers buffers;
  if (uses_kv_cache(shape.spec)) {
    const int64_t tiled =
        (max_keys(shape.spec, limits) + cuda::kTableKeys - 1) / cuda::kTableKeys * cuda::kTableKeys;
    buffers.page_table_stride = (tiled + shape.cache.page_size - 1) / shape.cache.page_size;
    buffers.page_table = workspace.take<int32_t>(limits.max_requests * buffers.page_table_stride);
  }
  WorkspaceCarver second = workspace;
  buffers.prefill = carve_work_list(workspace, shape, limits, *shape.kernels->prefill);
  if (shape.kernels->decode != nullptr) {
    buffers.decode = carve_work_list(second, shape, limits, *shape.kernels->decode);
    if (second.bytes() > workspace.bytes()) workspace = second;
  }
  return buffers;
}

}  // namespace fovea
