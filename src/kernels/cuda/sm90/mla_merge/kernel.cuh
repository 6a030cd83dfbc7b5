// SPDX-License-Identifier: Apache-2.0
// Joins the partial results of MLA row tiles, in ascending order of keys. Tiles are wide (512
// columns) and, at small batches, few with many parts: a warp takes 128 columns of one row, so that
// all of the GPU reads.
#pragma once

#include "kernels/cuda/common/mla_params.h"
#include "kernels/cuda/common/ptx.cuh"

namespace fovea::kernels::cuda {

template <int kRowTile, int kRank, Type kOut>
struct MlaMergeConfig {
  using Params = MlaMergeParams;
  static constexpr int kWarps = 8;
  static constexpr int kWarpColumns = 128;
  static constexpr int kBlocksPerSm = 1;
  static constexpr KernelTraits kTraits = {kWarps * 32, 0, kRowTile, kBlockKeys};

  __device__ static int64_t partial_row(const MlaMerge& item, int part, int row) {
    const int slot = part == 0 ? item.first : item.first + 2 * part - 1;
    return static_cast<int64_t>(slot) * kRowTile + row;
  }

  __device__ static void merge_columns(const Params& params, const MlaMerge& item, int row,
                                       int column) {
    const int packed = item.first_row + row;
    if (packed >= item.q_len * params.q_heads) return;
    const int lane = threadIdx.x % 32;
    constexpr int kRounds = kMlaMaxWorkers / 32;
    float weights[kRounds];
    float most = -infinity();
#pragma unroll
    for (int k = 0; k < kRounds; ++k) {
      const int part = lane + 32 * k;
      weights[k] =
          part < item.count ? params.work.partial_lse[partial_row(item, part, row)] : -infinity();
      most = fmaxf(most, weights[k]);
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
    const float base = most == -infinity() ? 0 : most;
    float total = 0;
#pragma unroll
    for (int k = 0; k < kRounds; ++k) total += weights[k] = __expf(weights[k] - base);
#pragma unroll
    for (int step = 1; step < 32; step *= 2) total += __shfl_xor_sync(~0u, total, step);
    const float inverse = total > 0 ? 1 / total : 0;
    float sum[4] = {};
    const float* from = params.work.partial_out + column + lane * 4;
#pragma unroll
    for (int k = 0; k < kRounds; ++k) {
      if (32 * k >= item.count) break;
      const float own = weights[k] * inverse;
      const int parts = min(item.count - 32 * k, 32);
#pragma unroll 8
      for (int p = 0; p < parts; ++p) {
        const float weight = __shfl_sync(~0u, own, p);
        const float4 value =
            *reinterpret_cast<const float4*>(from + partial_row(item, 32 * k + p, row) * kRank);
        sum[0] += weight * value.x;
        sum[1] += weight * value.y;
        sum[2] += weight * value.z;
        sum[3] += weight * value.w;
      }
    }
    const int64_t token = item.q_begin + packed / params.q_heads;
    const int head = packed % params.q_heads;
    if (params.lse && column == 0 && lane == 0) {
      params.lse[token * params.q_heads + head] = total > 0 ? most + logf(total) : -infinity();
    }
    auto* out = static_cast<uint16_t*>(params.out) + token * params.out_token_stride +
                head * params.out_head_stride + column + lane * 4;
    *reinterpret_cast<uint2*>(out) = {pack<kOut>(sum[0], sum[1]), pack<kOut>(sum[2], sum[3])};
  }

  __device__ static void run(const Params& params) {
    __shared__ int tiles[kMlaMaxWorkers];
    __shared__ int count;
    asm volatile("griddepcontrol.wait;" ::: "memory");
    if (threadIdx.x < 32) {
      int found = 0;
      for (int base = 0; base < params.work.workers; base += 32) {
        const int at = base + threadIdx.x;
        const bool used = at < params.work.workers && params.work.merges[at].count > 0;
        const unsigned mask = __ballot_sync(~0u, used);
        if (used) tiles[found + __popc(mask & ((1u << threadIdx.x) - 1))] = at;
        found += __popc(mask);
      }
      if (threadIdx.x == 0) count = found;
    }
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    __syncthreads();
    constexpr int kPieces = kRank / kWarpColumns;
    const int units = count * kRowTile * kPieces;
    for (int unit = threadIdx.x / 32 * gridDim.x + blockIdx.x; unit < units;
         unit += gridDim.x * kWarps) {
      const int row = unit / kPieces;
      merge_columns(params, params.work.merges[tiles[row / kRowTile]], row % kRowTile,
                    unit % kPieces * kWarpColumns);
    }
  }
};

template <int kRowTile, int kRank, Type kOut>
using Config = MlaMergeConfig<kRowTile, kRank, kOut>;

}  // namespace fovea::kernels::cuda
