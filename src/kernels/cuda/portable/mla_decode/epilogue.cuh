// SPDX-License-Identifier: Apache-2.0
// Stores accumulated values: to the output, or to a partial result for mla_merge.
#pragma once

#include "kernels/cuda/portable/mla_decode/mainloop.cuh"

namespace fovea::kernels::cuda {

// Where a row of the tile is stored.
template <class C>
struct RowTarget {
  bool exists, partial;
  int64_t row;  // row of the partial results, or token * q_heads + head
  int64_t out;  // index of the row's first value
  __device__ __forceinline__ RowTarget(const PortableMlaParams& params, const MlaItem& item, int at)
      : exists(at < live_rows<C>(params, item)), partial(item.partial >= 0) {
    if (partial) {
      row = static_cast<int64_t>(item.partial) * C::kRows + at;
      out = row * C::kRank;
      return;
    }
    const int packed = item.first_row + at;
    const int64_t token = item.q_begin + packed / params.batch.q_heads;
    const int head = packed % params.batch.q_heads;
    row = token * params.batch.q_heads + head;
    out = token * params.out.token_stride + head * params.out.head_stride;
  }
};

// Ends the softmax: stores LSEs, and the factors of the values in shared.row_factor.
template <class C>
__device__ __forceinline__ void finish_row(const PortableMlaParams& params, const MlaItem& item,
                                           float value_scale, SoftmaxRow& row,
                                           typename C::SharedMemory& shared) {
#pragma unroll
  for (int step = 1; step < C::kRowThreads; step *= 2) {
    row.sum += __shfl_xor_sync(~0u, row.sum, step);
  }
  if (threadIdx.x % C::kRowThreads != 0) return;
  const int at = threadIdx.x / C::kRowThreads;
  const bool empty = row.sum == 0;
  shared.row_factor[at] = empty ? 0 : value_scale / row.sum;
  const RowTarget<C> target(params, item, at);
  float* const lse = target.partial ? params.work.partial_lse : params.out.lse;
  if (!target.exists || lse == nullptr) return;
  lse[target.row] = empty ? -infinity() : (row.max + log2f(row.sum)) * kLn2;
}

template <class C>
__device__ __forceinline__ void store_values(const PortableMlaParams& params, const MlaItem& item,
                                             const Values<C>& values,
                                             const typename C::SharedMemory& shared) {
  const WarpPlace<C> place;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int tile = 0; tile < C::kRowTiles; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = place.first_row + tile * 16 + half * 8 + lane / 4;
      const RowTarget<C> target(params, item, at);
      if (!target.exists) continue;
      const float factor = shared.row_factor[at];
      const int64_t first = target.out + place.first_value + lane % 4 * 2;
#pragma unroll
      for (int d = 0; d < C::kValueColumns / 8; ++d) {
        const float low = values.of[tile][d][2 * half] * factor;
        const float high = values.of[tile][d][2 * half + 1] * factor;
        if (target.partial) {
          *reinterpret_cast<float2*>(static_cast<float*>(params.work.partial_out) + first +
                                     d * 8) = {low, high};
        } else {
          *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(params.out.data) + first + d * 8) =
              pack<C::kQ>(low, high);
        }
      }
    }
  }
}

}  // namespace fovea::kernels::cuda
