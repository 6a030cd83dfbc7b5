// SPDX-License-Identifier: Apache-2.0
// Writes accumulators to out and lse, or to a partial result for the merge.
#pragma once

#include "kernels/cuda/portable/attention/mainloop.cuh"

namespace fovea::kernels::cuda {

// Returns the factor of the sum over values: the scale that all tokens share, or 1 / kScaleUnit if
// weights have the tokens' own scales in them.
template <class Config>
__device__ float value_scale(const KeyParams& keys, int kv_head) {
  if (!Config::kConvert || !keys.v_scale) return 1.0f;
  return keys.scale_slot_stride ? 1.0f / Config::kScaleUnit
                                : keys.v_scale[kv_head * keys.scale_head_stride];
}

// Returns true if the thread's warp stores the columns of fragment d. Warps that split keys share
// all rows, and each stores some columns.
template <class Config>
__device__ bool stores_columns(int d) {
  return !Config::kSplitsKeys || d % Config::kWarps == threadIdx.x / 32;
}

// Adds up the sums of the lanes of a row; each lane has summed its own columns.
template <class Config>
__device__ void sum_lanes(Accumulator<Config>& sum) {
#pragma unroll
  for (auto& pair : sum.sum) {
#pragma unroll
    for (float& total : pair) {
      total += __shfl_xor_sync(~0u, total, 1);
      total += __shfl_xor_sync(~0u, total, 2);
    }
  }
}

// Adds up the sums of warps that split keys, in ascending order of warps, for the columns that a
// warp stores.
template <class Config>
__device__ void join_warps(Accumulator<Config>& sum, typename Config::SharedMemory& shared) {
  static_assert(Config::kRowFragments == 1);
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  __syncthreads();  // every warp has read its last keys, whose memory the parts overwrite
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (lane % 4 == 0) {
      shared.part_base[warp][lane / 4 + half * 8] = sum.base[0][half];
      shared.part_sum[warp][lane / 4 + half * 8] = sum.sum[0][half];
    }
  }
#pragma unroll
  for (int d = 0; d < Config::kHeadDimV / 8; ++d) {
#pragma unroll
    for (int i = 0; i < 4; ++i) shared.part_out[warp][d * 4 + i][lane] = sum.out[0][d][i];
  }
  __syncthreads();
  float weight[Config::kWarps][2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = lane / 4 + half * 8;
    float base = -infinity();
    for (int w = 0; w < Config::kWarps; ++w) base = fmaxf(base, shared.part_base[w][row]);
    sum.base[0][half] = base;
    sum.sum[0][half] = 0;
#pragma unroll
    for (int w = 0; w < Config::kWarps; ++w) {
      weight[w][half] = exp2_fast(shared.part_base[w][row] - exponent_base(base));
      sum.sum[0][half] += weight[w][half] * shared.part_sum[w][row];
    }
  }
#pragma unroll
  for (int d = 0; d < Config::kHeadDimV / 8; ++d) {
    if (!stores_columns<Config>(d)) continue;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float total = 0;
#pragma unroll
      for (int w = 0; w < Config::kWarps; ++w) {
        total += weight[w][i / 2] * shared.part_out[w][d * 4 + i][lane];
      }
      sum.out[0][d][i] = total;
    }
  }
}

template <class Config>
__device__ void store_row(const AttentionParams& params, const Tile& tile, const QueryRow& query,
                          int row, float base, float total,
                          const float (&values)[Config::kHeadDimV / 8][4], int low) {
  const int lane = threadIdx.x % 32;
  const bool stores_lse = lane % 4 == 0 && stores_columns<Config>(0);
  const bool empty = total == 0;
  float factor = empty ? 0.0f : value_scale<Config>(params.keys, tile.item.kv_head) / total;
  const float lse = empty ? -infinity() : (base + log2f(total)) * kLn2;
  const int64_t token = tile.view.q_begin + query.token;
  const int head = query.head;

  const bool partial = tile.item.partial >= 0;
  if (partial || params.f32_out) {
    const int64_t at = partial ? static_cast<int64_t>(tile.item.partial) * Config::kRowTile + row
                               : token * params.batch.q_heads + head;
    if (stores_lse) (partial ? params.work.partial_lse : params.lse)[at] = lse;
    float* to = (partial ? params.work.partial_out : static_cast<float*>(params.out)) +
                at * params.head_dim_v;
#pragma unroll
    for (int d = 0; d < Config::kHeadDimV / 8; ++d) {
      const int column = d * 8 + lane % 4 * 2;
      if (column >= params.head_dim_v || !stores_columns<Config>(d)) continue;
      to[column] = values[d][low] * factor;
      to[column + 1] = values[d][low + 1] * factor;
    }
    return;
  }
  if (params.lse && stores_lse) params.lse[token * params.lse_token_stride + head] = lse;
  if (params.sinks && !empty) factor /= 1.0f + __expf(params.sinks[head] - lse);
  uint16_t* to = static_cast<uint16_t*>(params.out) + token * params.out_token_stride +
                 head * params.out_head_stride;
#pragma unroll
  for (int d = 0; d < Config::kHeadDimV / 8; ++d) {
    const int column = d * 8 + lane % 4 * 2;
    if (column >= params.head_dim_v || !stores_columns<Config>(d)) continue;
    *reinterpret_cast<uint32_t*>(to + column) =
        pack<Config::kOut>(values[d][low] * factor, values[d][low + 1] * factor);
  }
}

template <class Config>
__device__ void store_tile(const AttentionParams& params, const Tile& tile,
                           Accumulator<Config>& sum, typename Config::SharedMemory& shared) {
  sum_lanes<Config>(sum);
  if constexpr (Config::kSplitsKeys) join_warps<Config>(sum, shared);
#pragma unroll
  for (int m = 0; m < Config::kRowFragments; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp_row<Config>() + m * 16 + threadIdx.x % 32 / 4 + half * 8;
      if (row >= tile.rows) continue;
      store_row<Config>(params, tile, shared.queries[row], row, sum.base[m][half], sum.sum[m][half],
                        sum.out[m], 2 * half);
    }
  }
}

}  // namespace fovea::kernels::cuda
