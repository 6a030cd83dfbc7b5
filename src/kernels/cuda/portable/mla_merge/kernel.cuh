// SPDX-License-Identifier: Apache-2.0
// Joins the partial results of MLA row tiles, in ascending order of keys. A warp takes a row, or
// where tiles have few, 128 columns of one; where parts are many, several warps share them: all of
// the GPU is to read at once.
#pragma once

#include "kernels/cuda/common/mla_params.h"
#include "kernels/cuda/common/ptx.cuh"

namespace fovea::kernels::cuda {

template <int kRowTile, int kRank, Type kOut>
struct MlaMergeConfig {
  using Params = MlaMergeParams;
  static constexpr int kWarps = 8;
  static constexpr int kRowPieces = kRank / 128;  // of four columns a lane
  static constexpr int kPieces = kRowTile <= 32 ? 1 : kRowPieces;  // of a warp
  static constexpr int kUnits = kRowPieces / kPieces;              // warps that share a row
  static constexpr int kBatch = 16 / kPieces;                      // parts in flight
  // sm_120 spills with the registers of two blocks.
  static constexpr int kBlocksPerSm = __CUDA_ARCH__ == 1200 ? 1 : 2;
  static constexpr KernelTraits kTraits = {kWarps * 32, 0, kRowTile, kBlockKeys};

  struct Values {
    float4 pieces[kPieces];
  };

  __device__ static int64_t partial_row(const MlaMerge& item, int part, int row) {
    const int slot = part == 0 ? item.first : item.first + 2 * part - 1;
    return static_cast<int64_t>(slot) * kRowTile + row;
  }

  // Warps that share the parts of a unit.
  __device__ static int warps_of_unit(int parts) {
    return parts <= kBatch ? 1 : parts <= 2 * kBatch ? 2 : parts <= 4 * kBatch ? 4 : 8;
  }

  __device__ __forceinline__ static void load_parts(const Params& params, const MlaMerge& item,
                                                    int row, int column, int first,
                                                    int end, Values (&values)[kBatch]) {
    const float* from = params.work.partial_out + column + threadIdx.x % 32 * 4;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (first + i >= end) break;
      const float* part = from + partial_row(item, first + i, row) * kRank;
#pragma unroll
      for (int k = 0; k < kPieces; ++k) {
        values[i].pieces[k] = *reinterpret_cast<const float4*>(part + 128 * k);
      }
    }
  }

  // The weighted sum of parts [first, end); most and total: of all parts.
  __device__ static Values sum_parts(const Params& params, const MlaMerge& item, int row, int column,
                                     int first, int end, float& most, float& total) {
    const int lane = threadIdx.x % 32;
    Values values[kBatch];
    load_parts(params, item, row, column, first, end, values);
    const float* lse = params.work.partial_lse;
    most = -infinity();
    for (int part = lane; part < item.count; part += 32) {
      most = fmaxf(most, lse[partial_row(item, part, row)]);
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
    const float base = most == -infinity() ? 0 : most;
    total = 0;
    for (int part = lane; part < item.count; part += 32) {
      total += __expf(lse[partial_row(item, part, row)] - base);
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) total += __shfl_xor_sync(~0u, total, step);
    const float inverse = total > 0 ? 1 / total : 0;
    Values sum = {};
    for (int at = first; at < end; at += kBatch) {
      if (at > first) load_parts(params, item, row, column, at, end, values);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (at + i >= end) break;
        const float weight = __expf(lse[partial_row(item, at + i, row)] - base) * inverse;
#pragma unroll
        for (int k = 0; k < kPieces; ++k) add(sum.pieces[k], values[i].pieces[k], weight);
      }
    }
    return sum;
  }

  __device__ __forceinline__ static void add(float4& sum, const float4& value, float weight) {
    sum.x += weight * value.x;
    sum.y += weight * value.y;
    sum.z += weight * value.z;
    sum.w += weight * value.w;
  }

  __device__ static void store_row(const Params& params, const MlaMerge& item, int packed,
                                   int column, const Values& sum, float most, float total) {
    const int lane = threadIdx.x % 32;
    const int64_t token = item.q_begin + packed / params.q_heads;
    const int head = packed % params.q_heads;
    if (params.lse && column == 0 && lane == 0) {
      params.lse[token * params.q_heads + head] = total > 0 ? most + logf(total) : -infinity();
    }
    auto* out = static_cast<uint16_t*>(params.out) + token * params.out_token_stride +
                head * params.out_head_stride + column + lane * 4;
#pragma unroll
    for (int k = 0; k < kPieces; ++k) {
      const float4& v = sum.pieces[k];
      *reinterpret_cast<uint2*>(out + 128 * k) = {pack<kOut>(v.x, v.y), pack<kOut>(v.z, v.w)};
    }
  }

  // mla_decode waits for the plan before it lets this kernel start, so the plan can be read before
  // mla_decode is done; from the L2 cache, for no kernel boundary is in between.
  __device__ static MlaMerge planned_merge(const MlaMerge& item) {
    return {__ldcg(&item.q_begin), __ldcg(&item.q_len), __ldcg(&item.first_row),
            __ldcg(&item.first), __ldcg(&item.count)};
  }

  __device__ static void run(const Params& params) {
    __shared__ MlaMerge tiles[kMlaMaxWorkers];
    __shared__ int tile_count, most_parts;
    __shared__ float4 sums[kWarps][kPieces][32];
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    if (warp == 0) {
      int found = 0;
      int most = 0;
      for (int base = 0; base < params.work.workers; base += 32) {
        const int at = base + lane;
        MlaMerge merge = {};
        if (at < params.work.workers) merge = planned_merge(params.work.merges[at]);
        const unsigned mask = __ballot_sync(~0u, merge.count > 0);
        if (merge.count > 0) tiles[found + __popc(mask & ((1u << lane) - 1))] = merge;
        found += __popc(mask);
        most = max(most, merge.count);
      }
      most = __reduce_max_sync(~0u, most);
      if (lane == 0) {
        tile_count = found;
        most_parts = most;
      }
    }
    allow_next_kernel();
    __syncthreads();
    wait_for_previous_kernel();
    const int sharing = warps_of_unit(most_parts);
    const int share = warp % sharing;
    const int step = kWarps / sharing;  // units of the block at a time
    const int units = tile_count * kRowTile * kUnits;
    for (int base = blockIdx.x * step; base < units; base += gridDim.x * step) {
      const int at = base + warp / sharing;
      const MlaMerge& item = tiles[min(at, units - 1) / (kRowTile * kUnits)];
      const int row = at / kUnits % kRowTile;
      const int column = at % kUnits * kPieces * 128;
      const bool valid = at < units && item.first_row + row < item.q_len * params.q_heads;
      float most = 0;
      float total = 0;
      Values sum = {};
      if (valid) {
        sum = sum_parts(params, item, row, column, item.count * share / sharing,
                        item.count * (share + 1) / sharing, most, total);
      }
      if (sharing > 1) {
        __syncthreads();  // the last round's sums have been read
#pragma unroll
        for (int k = 0; k < kPieces; ++k) sums[warp][k][lane] = sum.pieces[k];
        __syncthreads();
        if (share > 0) continue;
        for (int other = 1; other < sharing; ++other) {
#pragma unroll
          for (int k = 0; k < kPieces; ++k) add(sum.pieces[k], sums[warp + other][k][lane], 1);
        }
      }
      if (valid) store_row(params, item, item.first_row + row, column, sum, most, total);
    }
  }
};

template <int kRowTile, int kRank, Type kOut>
using Config = MlaMergeConfig<kRowTile, kRank, kOut>;

}  // namespace fovea::kernels::cuda
