// SPDX-License-Identifier: Apache-2.0
// Joins the partial results of MLA row tiles, in ascending order of keys. A warp takes 16 bytes a
// lane of a row. Many parts are shared by several warps, so that the whole GPU reads at once.
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
  static constexpr int kLaneColumns = kF16Parts ? 8 : 4;      // 16 bytes of a part
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

  // Returns how many warps share the parts of a unit.
  __device__ static int warps_of_unit(int parts) {
    return parts <= kBatch ? 1 : parts <= 2 * kBatch ? 2 : parts <= 4 * kBatch ? 4 : 8;
  }

  // Loads a lane's columns of parts [first, end).
  __device__ __forceinline__ static void load_parts(const Params& params, const MlaMerge& item,
                                                    int row, int column, int first, int end,
                                                    uint4 (&values)[kBatch]) {
    constexpr int kBytes = kF16Parts ? 2 : 4;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (first + i >= end) break;
      const int64_t at = partial_row(item, first + i, row) * kRank + column;
      values[i] = *reinterpret_cast<const uint4*>(
          static_cast<const char*>(params.work.partial_out) + at * kBytes);
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

  // Returns the weighted sum of parts [first, end), at most 32; `max` and `total` are of all parts.
  // LSEs are loaded first, so that weights are known when the values arrive.
  __device__ static Sum sum_parts(const Params& params, const MlaMerge& item, int row, int column,
                                  int first, int end, float& max, float& total) {
    const int lane = threadIdx.x % 32;
    const float* lse = params.work.partial_lse;
    const int64_t own = partial_row(item, min(first + lane, item.count - 1), row);
    const float own_lse = lse[own];
    max = lane < item.count ? lse[partial_row(item, lane, row)] : -infinity();
    float2 units = {1, 1};  // units of both halves of the columns
    if constexpr (kF16Parts) {
      units = reinterpret_cast<const float2*>(params.work.partial_units)[own];
    }
    uint4 values[kBatch];
    load_parts(params, item, row, column, first, end, values);
    total = max == -infinity() ? 0 : 1;  // sum over this lane's parts, relative to their maximum
    for (int part = lane + 32; part < item.count; part += 32) {
      const float one = lse[partial_row(item, part, row)];
      const float next = fmaxf(max, one);
      if (next == -infinity()) continue;
      total = total * __expf(max - next) + __expf(one - next);
      max = next;
    }
    const float of_lane = max;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) max = fmaxf(max, __shfl_xor_sync(~0u, max, step));
    const float base = max == -infinity() ? 0 : max;
    total *= __expf(of_lane - base);
#pragma unroll
    for (int step = 1; step < 32; step *= 2) total += __shfl_xor_sync(~0u, total, step);
    const float weight = total > 0 ? __fdividef(__expf(own_lse - base), total) : 0;
    const bool right = column >= kRank / 2;
    units.x *= weight;
    units.y *= weight;
    Sum sum = {};
    for (int at = first; at < end; at += kBatch) {
      if (at > first) load_parts(params, item, row, column, at, end, values);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (at + i >= end) break;
        const int part = at + i - first;
        float factor = __shfl_sync(~0u, right ? units.y : units.x, part);
        if constexpr (kUnits == 1) {  // the warp has columns of both halves
          const float left_factor = __shfl_sync(~0u, units.x, part);
          const float right_factor = __shfl_sync(~0u, units.y, part);
          factor = right ? right_factor : left_factor;
        }
        add(sum, values[i], factor);
      }
    }
    return sum;
  }

  // Where a row's columns from `column` on and its LSE are stored.
  struct Place {
    uint16_t* out;
    float* lse;  // or null

    __device__ Place(const Params& params, const MlaMerge& item, int packed, int column) {
      const int64_t token = item.q_begin + packed / params.q_heads;
      const int head = packed % params.q_heads;
      out = static_cast<uint16_t*>(params.out.data) + token * params.out.token_stride +
            head * params.out.head_stride + column;
      lse =
          params.out.lse && column == 0 ? params.out.lse + token * params.q_heads + head : nullptr;
    }
    __device__ void store(const Sum& sum, float max, float total) const {
      if (lse) *lse = total > 0 ? max + logf(total) : -infinity();
#pragma unroll
      for (int i = 0; i < kLaneColumns; i += 4) {
        const float* v = sum.columns + i;
        *reinterpret_cast<uint2*>(out + i) = {pack<kOut>(v[0], v[1]), pack<kOut>(v[2], v[3])};
      }
    }
  };

  // The attention kernel waits for the plan before it allows this kernel to start, so the plan can
  // be read before attention has ended: through the L2 cache, as there is no kernel boundary
  // between.
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
    // One entry a thread.
    static_assert(kMlaMaxWorkers <= kWarps * 32);
    MlaMerge own = {};
    if (static_cast<int>(threadIdx.x) < params.work.workers) {
      own = planned_merge(params.work.merges[threadIdx.x]);
    }
    const unsigned mask = __ballot_sync(~0u, own.count > 0);
    const int max_count = __reduce_max_sync(~0u, own.count);
    if (lane == 0) {
      found[warp] = __popc(mask);
      largest[warp] = max_count;
    }
    __syncthreads();
    int tile_count = 0;
    int max_parts = 0;
    int before = __popc(mask & ((1u << lane) - 1));
    for (int w = 0; w < kWarps; ++w) {
      if (w == warp) before += tile_count;
      tile_count += found[w];
      max_parts = max(max_parts, largest[w]);
    }
    if (own.count > 0) tiles[before] = own;
    allow_next_kernel();
    const int sharing = warps_of_unit(max_parts);
    const int share = warp % sharing;
    const int step = kWarps / sharing;  // units of the block at a time
    const int units = tile_count * kRowTile * kUnits;
    // Blocks without work end, to make room for the next kernel. The first block waits, so that a
    // kernel that waits for this one also waits for attention.
    if (blockIdx.x > 0 && static_cast<int>(blockIdx.x) * step >= units) return;
    __syncthreads();
    for (int base = blockIdx.x * step; base < units; base += gridDim.x * step) {
      const int at = base + warp / sharing;
      const MlaMerge item = tiles[min(at, units - 1) / (kRowTile * kUnits)];
      const int row = at / kUnits % kRowTile;
      const int column = (at % kUnits * 32 + lane) * kLaneColumns;
      const bool valid = at < units && item.first_row + row < item.q_len * params.q_heads;
      const Place place(params, item, item.first_row + (valid ? row : 0), column);
      float max = 0;
      float total = 0;
      Sum sum = {};
      wait_for_previous_kernel();
      if (valid) {
        sum = sum_parts(params, item, row, column, item.count * share / sharing,
                        item.count * (share + 1) / sharing, max, total);
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
      if (valid) place.store(sum, max, total);
    }
    wait_for_previous_kernel();  // the first block, if it has no work
  }
};

template <int kRowTile, int kRank, Type kOut, Type kParts>
using Config = MlaMergeConfig<kRowTile, kRank, kOut, kParts>;

}  // namespace fovea::kernels::cuda
