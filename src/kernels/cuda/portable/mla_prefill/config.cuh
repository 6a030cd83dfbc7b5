// SPDX-License-Identifier: Apache-2.0
// The operations, and how they go through rows. Copies move 16-bit elements of any type.
#pragma once

#include "kernels/cuda/common/bf16_as.cuh"
#include "kernels/cuda/common/fp8_values.cuh"
#include "kernels/cuda/common/mla_prefill_params.h"
#include "kernels/cuda/common/overlap.cuh"
#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/common/scan.cuh"
#include "kernels/mla_row.h"

namespace fovea::kernels::cuda {

enum Op { forms, gather, join };

constexpr int kRowWarps = 8;  // rows of a CTA
constexpr int kChunk = 8;     // elements of 16 bytes

// Calls visit(row) for all rows below `rows`. kLanes neighbouring threads, up to a warp, share a
// row.
template <int kLanes = 32, typename Visit>
__device__ inline void for_each_row(int64_t rows, Visit visit) {
  constexpr int kAtOnce = kRowWarps * 32 / kLanes;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kAtOnce + threadIdx.x / kLanes;
  for (int64_t row = first; row < rows; row += gridDim.x * kAtOnce) visit(row);
}

// Copies `count` elements, a multiple of kChunk. One warp.
__device__ inline void copy_row(uint16_t* to, const uint16_t* from, int count) {
  for (int i = threadIdx.x % 32; i < count / kChunk; i += 32) {
    reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
  }
}

// Describes the chunk of the rows from first_row on. One block.
__device__ inline void describe_chunk(const MlaChunk& chunk, int requests, const int32_t* q_indptr,
                                      const int32_t* row_indptr, int first_row) {
  const int rows = min(max(row_indptr[requests] - first_row, 0), chunk.max_rows);
  for (int i = static_cast<int>(threadIdx.x); i <= requests; i += static_cast<int>(blockDim.x)) {
    chunk.indptr[i] = rows > 0 ? q_indptr[i] : 0;
    if (i == requests) break;
    const int begin = max(row_indptr[i] - first_row, 0);
    const int end = min(row_indptr[i + 1] - first_row, rows);
    chunk.begin[i] = min(begin, chunk.max_rows - 1);
    chunk.lens[i] = max(end - begin, 0);
  }
  if (threadIdx.x == 0) *chunk.live_rows = rows;
}

// Returns the last i in [0, count) with indptr[i] <= row.
__device__ inline int find_request(const int32_t* indptr, int count, int row) {
  int low = 0;
  int high = count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (indptr[middle] <= row ? low : high) = middle;
  }
  return low;
}

}  // namespace fovea::kernels::cuda
