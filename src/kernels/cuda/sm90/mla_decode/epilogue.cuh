// SPDX-License-Identifier: Apache-2.0
// Stores accumulated values and LSEs: to the output, or to a partial result for the merge.
#pragma once

#include "kernels/cuda/sm90/mla_common/masks.cuh"
#include "kernels/cuda/sm90/mla_common/outputs.cuh"
#include "kernels/cuda/sm90/mla_decode/config.cuh"

namespace fovea::kernels::cuda {

// Two rows of a half's columns, as a thread of a value warpgroup holds them.
template <class C>
struct ValueRows {
  float inverse[2];  // factors of the rows: 1 / sum of the weights, with the scale of the values
  float out[C::kValueColumns / 2];

  // The largest magnitude of row r in the half's columns, over the four lanes that hold it.
  __device__ __forceinline__ float largest(int r) const {
    float largest = 0;
#pragma unroll
    for (int i = 0; i < C::kValueColumns / 8; ++i) {
      largest = fmaxf(largest, fmaxf(fabsf(out[4 * i + 2 * r]), fabsf(out[4 * i + 2 * r + 1])));
    }
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    return fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
  }

  // Stores row r times `factor`. Four lanes exchange columns, so that a warp stores 64 bytes of
  // each row at once.
  template <Type kTo>
  __device__ __forceinline__ void store(uint16_t* to, bool valid, int r, float factor) const {
#pragma unroll
    for (int i = 0; i < C::kValueColumns / 8; i += 4) {
      uint32_t words[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        words[k] =
            pack<kTo>(out[4 * (i + k) + 2 * r] * factor, out[4 * (i + k) + 2 * r + 1] * factor);
      }
      store_words(to + i * 8, valid, words);
    }
  }
};

// Index of a block's row among the rows of partial results.
template <class C>
__device__ __forceinline__ int64_t part_row(const RowTile& tile, int row) {
  const int slot = tile.item.partial;
  const int first = tile.first_row - tile.item.first_row;
  return static_cast<int64_t>(slot) * (C::kBlocks * C::kRows) + first + row;
}

template <class C>
__device__ __forceinline__ void store_lse(const MlaDecodeParams& params, const RowTile& tile,
                                          int half, float lse) {
  const int row = thread_row(half);
  if (threadIdx.x % 4 != 0 || row >= tile.rows) return;
  if (tile.item.partial >= 0) {
    params.work.partial_lse[part_row<C>(tile, row)] = lse;
  } else if (params.out.lse) {
    const int packed = tile.first_row + row;
    params.out.lse[static_cast<int64_t>(tile.view.q_begin) * params.q_heads + packed] = lse;
  }
}

// The output of a row's half of the columns.
template <class C>
__device__ __forceinline__ uint16_t* output_row(const MlaDecodeParams& params, const RowTile& tile,
                                                int half, int row) {
  const int packed = tile.first_row + row;
  const int64_t token = tile.view.q_begin + packed / params.q_heads;
  return static_cast<uint16_t*>(params.out.data) + token * params.out.token_stride +
         packed % params.q_heads * params.out.head_stride + half * C::kValueColumns;
}

// Stores row r of a partial result as f16, in multiples of a unit.
template <class C>
__device__ __forceinline__ void store_partial_row(const MlaDecodeParams& params,
                                                  const RowTile& tile, int half, int r,
                                                  const ValueRows<C>& values) {
  const uint32_t unit = unit_bits(values.largest(r) * values.inverse[r]);
  const float factor = values.inverse[r] * inverse_unit(unit);
  const int row = thread_row(r);
  const int64_t place = part_row<C>(tile, row);
  const bool valid = row < tile.rows;
  if (valid && threadIdx.x % 4 == 0) {
    params.work.partial_units[2 * place + half] = __uint_as_float(unit);
  }
  values.template store<f16>(
      static_cast<uint16_t*>(params.work.partial_out) + place * C::kRank + half * C::kValueColumns,
      valid, r, factor);
}

template <class C>
__device__ __forceinline__ void store_output_row(const MlaDecodeParams& params, const RowTile& tile,
                                                 int half, int r, const ValueRows<C>& values) {
  const int row = thread_row(r);
  const bool valid = row < tile.rows;
  values.template store<C::kQ>(output_row<C>(params, tile, half, valid ? row : 0), valid, r,
                               values.inverse[r]);
}

template <class C>
__device__ __forceinline__ void store_values(const MlaDecodeParams& params, const RowTile& tile,
                                             int half, const ValueRows<C>& values) {
  if (tile.item.partial >= 0) {
#pragma unroll
    for (int r = 0; r < 2; ++r) store_partial_row<C>(params, tile, half, r, values);
  } else {
#pragma unroll
    for (int r = 0; r < 2; ++r) store_output_row<C>(params, tile, half, r, values);
  }
}

}  // namespace fovea::kernels::cuda
