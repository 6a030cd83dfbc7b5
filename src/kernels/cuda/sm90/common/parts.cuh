// SPDX-License-Identifier: Apache-2.0
// The end of parts of the keys of row tiles, for groups of requests with a common prefix and for
// batches with few row tiles over many keys. Results are f32, in the places and the order of rows
// of portable/attention, whose merge joins them. Those of whole row tiles are f32 only if f32_out
// says so.
#pragma once

#include "kernels/cuda/sm90/common/fp8.cuh"

namespace fovea::kernels::cuda {

// Returns the place of a row's result: in the part's slot, or in out and lse for a whole row tile.
template <class Config>
__device__ __forceinline__ int64_t place_of_row(const PrefillParams& params, const TileSlot& slot,
                                                int consumer, int row) {
  const int32_t partial = static_cast<const PartSlot&>(slot).partial;
  if (partial >= 0)
    return static_cast<int64_t>(partial) * Config::kTraits.row_tile + consumer * kGroupRows + row;
  return static_cast<int64_t>(slot.work.q_begin + row_token(params, slot.work, consumer, row)) *
             params.attention.lse_token_stride +
         row_head(params, slot.work, row);
}

// Returns whether the item is a whole row tile whose result needs no merge.
__device__ __forceinline__ bool is_final(const PrefillParams& params, const TileSlot& slot) {
  return static_cast<const PartSlot&>(slot).partial < 0 && !params.attention.f32_out;
}

// Finds the factor of each of the thread's rows that turns sums into means, and stores lse.
template <class Config>
__device__ __forceinline__ void finish_part(const PrefillParams& params, const TileSlot& slot,
                                            int consumer, const Accumulators<Config>& acc,
                                            float (&factor)[2]) {
  const AttentionParams& attention = params.attention;
  float* to =
      static_cast<const PartSlot&>(slot).partial >= 0 ? attention.work.partial_lse : attention.lse;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float total = acc.sum[half];
    total += __shfl_xor_sync(~0u, total, 1);
    total += __shfl_xor_sync(~0u, total, 2);
    const bool empty = total == 0;
    factor[half] =
        empty ? 0.0f : value_unit<Config>(attention, slot.work, acc) * __fdividef(1.0f, total);
    const int row = thread_row(half);
    if (threadIdx.x % 4 != 0 || row_token(params, slot.work, consumer, row) >= slot.work.q_len)
      continue;
    to[place_of_row<Config>(params, slot, consumer, row)] =
        empty ? -infinity() : (acc.base[half] + log2f(total)) * kLn2;
  }
}

// Stores a part: four neighbouring lanes store 32 bytes of a row at a time, or 16.
template <class Config>
__device__ __forceinline__ void store_part(const PrefillParams& params, const TileSlot& slot,
                                           int consumer, const float (&factor)[2],
                                           const Accumulators<Config>& acc) {
  const AttentionParams& attention = params.attention;
  const WorkTile& work = slot.work;
  const bool final = is_final(params, slot);
  void* out =
      static_cast<const PartSlot&>(slot).partial >= 0 ? attention.work.partial_out : attention.out;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = thread_row(half);
    const int token = row_token(params, work, consumer, row);
    if (token >= work.q_len) continue;
    const int first = threadIdx.x % 4 * 2;
    const int64_t at =
        final ? (work.q_begin + token) * attention.out_token_stride +
                    row_head(params, work, row) * attention.out_head_stride
              : place_of_row<Config>(params, slot, consumer, row) * attention.head_dim_v;
#pragma unroll
    for (int j = 0; j < Config::kHeadDimV / 8; ++j) {
      const int column = first + 8 * j;
      if (column >= attention.head_dim_v) break;
      const float2 mean = {acc.out[4 * j + 2 * half] * factor[half],
                           acc.out[4 * j + 2 * half + 1] * factor[half]};
      if (final) {
        *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(out) + at + column) =
            pack<Config::kOut>(mean.x, mean.y);
      } else {
        *reinterpret_cast<float2*>(static_cast<float*>(out) + at + column) = mean;
      }
    }
  }
}

}  // namespace fovea::kernels::cuda
