// SPDX-License-Identifier: Apache-2.0
// Joins the partial results of MLA row tiles, in ascending order of keys. A warp takes 16 bytes a lane
// of a row; where parts are many, several warps share them: all of the GPU is to read at once.
#pragma once

#include "kernels/cuda/common/fp8_codes.cuh"
#include "kernels/cuda/common/mla_params.h"
#include "kernels/cuda/common/ptx.cuh"

namespace fovea::kernels::cuda {

template <int kRowTile, int kRank, Type kOut, Type kParts>
struct MlaMergeConfig {
  using Params = MlaMergeParams;
  static constexpr int kWarps = 8;
  static constexpr bool kF16Parts = kParts == f16;
  static constexpr int kLaneColumns = kF16Parts ? 8 : 4;  // 16 bytes of a part
  static constexpr int kUnits = kRank / (32 * kLaneColumns);  // warps that share a row
  static constexpr int kBatch = kF16Parts ? 9 : 16;           // parts in flight
  // sm_120 spills with the registers of two blocks.
  static constexpr int kBlocksPerSm = __CUDA_ARCH__ == 1200 ? 1 : 2;
  static constexpr KernelTraits kTraits = {kWarps * 32, 0, kRowTile, kBlockKeys};

  struct Sum {
    float columns[kLaneColumns];
  };

  __device__ static int64_t partial_row(const MlaMerge& item, int part, int row) {
    const int slot = part == 0 ? item.first : item.first + 2 * part - 1;
    return static_cast<int64_t>(slot) * kRowTile + row;
  }

  // Warps that share the parts of a unit.
  __device__ static int warps_of_unit(int parts) {
    return parts <= kBatch ? 1 : parts <= 2 * kBatch ? 2 : parts <= 4 * kBatch ? 4 : 8;
  }

  // A lane's columns of parts [first, end), and what they are multiples of.
  __device__ __forceinline__ static void load_parts(const Params& params, const MlaMerge& item,
                                                    int row, int column, int first, int end,
                                                    uint4 (&values)[kBatch],
                                                    float (&units)[kBatch]) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (first + i >= end) break;
      const int64_t place = partial_row(item, first + i, row);
      const int64_t at = place * kRank + column;
      if constexpr (kF16Parts) {
        values[i] = *reinterpret_cast<const uint4*>(
            static_cast<const uint16_t*>(params.work.partial_out) + at);
        units[i] = params.work.partial_units[2 * place + column / (kRank / 2)];
      } else {
        values[i] =
            *reinterpret_cast<const uint4*>(static_cast<const float*>(params.work.partial_out) + at);
        units[i] = 1;
      }
    }
  }

  __device__ __forceinline__ static void add(Sum& sum, const uint4& values, float weight) {
    const uint32_t words[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kF16Parts) {
        sum.columns[2 * i] += weight * to_float<f16>(static_cast<uint16_t>(words[i]));
        sum.columns[2 * i + 1] += weight * to_float<f16>(static_cast<uint16_t>(words[i] >> 16));
      } else {
        sum.columns[i] += weight * __uint_as_float(words[i]);
      }
    }
  }

  // The weighted sum of parts [first, end); most and total: of all parts.
  __device__ static Sum sum_parts(const Params& params, const MlaMerge& item, int row, int column,
                                  int first, int end, float& most, float& total) {
    const int lane = threadIdx.x % 32;
    uint4 values[kBatch];
    float units[kBatch];
    load_parts(params, item, row, column, first, end, values, units);
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
    Sum sum = {};
    for (int at = first; at < end; at += kBatch) {
      if (at > first) load_parts(params, item, row, column, at, end, values, units);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (at + i >= end) break;
        const float weight = __expf(lse[partial_row(item, at + i, row)] - base) * inverse;
        add(sum, values[i], weight * units[i]);
      }
    }
    return sum;
  }

  __device__ static void store_row(const Params& params, const MlaMerge& item, int packed,
                                   int column, const Sum& sum, float most, float total) {
    const int64_t token = item.q_begin + packed / params.q_heads;
    const int head = packed % params.q_heads;
    if (params.lse && column == 0) {
      params.lse[token * params.q_heads + head] = total > 0 ? most + logf(total) : -infinity();
    }
    auto* out = static_cast<uint16_t*>(params.out) + token * params.out_token_stride +
                head * params.out_head_stride + column;
#pragma unroll
    for (int i = 0; i < kLaneColumns; i += 4) {
      const float* v = sum.columns + i;
      *reinterpret_cast<uint2*>(out + i) = {pack<kOut>(v[0], v[1]), pack<kOut>(v[2], v[3])};
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
    __shared__ int found[kWarps], largest[kWarps];
    __shared__ float sums[kWarps][kLaneColumns][32];
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    // An entry a thread: a warp that looked at all in turn took 0.2 us for each 32 (2026-11-22).
    static_assert(kMlaMaxWorkers <= kWarps * 32);
    MlaMerge own = {};
    if (static_cast<int>(threadIdx.x) < params.work.workers) {
      own = planned_merge(params.work.merges[threadIdx.x]);
    }
    const unsigned mask = __ballot_sync(~0u, own.count > 0);
    const int most = __reduce_max_sync(~0u, own.count);
    if (lane == 0) {
      found[warp] = __popc(mask);
      largest[warp] = most;
    }
    __syncthreads();
    int tile_count = 0;
    int most_parts = 0;
    int before = __popc(mask & ((1u << lane) - 1));
    for (int w = 0; w < kWarps; ++w) {
      if (w == warp) before += tile_count;
      tile_count += found[w];
      most_parts = max(most_parts, largest[w]);
    }
    if (own.count > 0) tiles[before] = own;
    allow_next_kernel();
    const int sharing = warps_of_unit(most_parts);
    const int share = warp % sharing;
    const int step = kWarps / sharing;  // units of the block at a time
    const int units = tile_count * kRowTile * kUnits;
    // Blocks without work make room for the next kernel: 34.3 instead of 36.0 us at 64 x 1k, where
    // nothing is merged (2026-11-22). The first one waits, and who waits for this kernel waits for
    // mla_decode as well.
    if (blockIdx.x > 0 && static_cast<int>(blockIdx.x) * step >= units) return;
    __syncthreads();
    wait_for_previous_kernel();
    for (int base = blockIdx.x * step; base < units; base += gridDim.x * step) {
      const int at = base + warp / sharing;
      const MlaMerge& item = tiles[min(at, units - 1) / (kRowTile * kUnits)];
      const int row = at / kUnits % kRowTile;
      const int column = (at % kUnits * 32 + lane) * kLaneColumns;
      const bool valid = at < units && item.first_row + row < item.q_len * params.q_heads;
      float most = 0;
      float total = 0;
      Sum sum = {};
      if (valid) {
        sum = sum_parts(params, item, row, column, item.count * share / sharing,
                        item.count * (share + 1) / sharing, most, total);
      }
      if (sharing > 1) {
        __syncthreads();  // the last round's sums have been read
#pragma unroll
        for (int i = 0; i < kLaneColumns; ++i) sums[warp][i][lane] = sum.columns[i];
        __syncthreads();
        if (share > 0) continue;
        for (int other = 1; other < sharing; ++other) {
#pragma unroll
          for (int i = 0; i < kLaneColumns; ++i) sum.columns[i] += sums[warp + other][i][lane];
        }
      }
      if (valid) store_row(params, item, item.first_row + row, column, sum, most, total);
    }
  }
};

template <int kRowTile, int kRank, Type kOut, Type kParts>
using Config = MlaMergeConfig<kRowTile, kRank, kOut, kParts>;

}  // namespace fovea::kernels::cuda
