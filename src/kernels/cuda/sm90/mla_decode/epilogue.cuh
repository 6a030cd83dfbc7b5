// SPDX-License-Identifier: Apache-2.0
// Accumulated values to the output, or to a partial result that merge joins.
#pragma once

#include "kernels/cuda/sm90/mla_decode/mainloop.cuh"

namespace fovea::kernels::cuda {

// Four registers of each of the four lanes of a row, transposed among the lanes.
__device__ __forceinline__ void transpose_quad(uint32_t (&w)[4]) {
  const int lane = threadIdx.x % 4;
  const bool odd = lane & 1;
  const uint32_t near0 = __shfl_xor_sync(~0u, odd ? w[0] : w[1], 1);
  const uint32_t near1 = __shfl_xor_sync(~0u, odd ? w[2] : w[3], 1);
  const uint32_t low[2] = {odd ? near0 : w[0], odd ? w[1] : near0};
  const uint32_t high[2] = {odd ? near1 : w[2], odd ? w[3] : near1};
  const bool upper = lane & 2;
  const uint32_t far0 = __shfl_xor_sync(~0u, upper ? low[0] : high[0], 2);
  const uint32_t far1 = __shfl_xor_sync(~0u, upper ? low[1] : high[1], 2);
  w[0] = upper ? far0 : low[0];
  w[1] = upper ? far1 : low[1];
  w[2] = upper ? high[0] : far0;
  w[3] = upper ? high[1] : far1;
}

// Four words of each of the four lanes of a row, to its next 64 bytes.
__device__ __forceinline__ void store_words(uint16_t* to, bool valid, uint32_t (&words)[4]) {
  transpose_quad(words);
  if (!valid) return;
  *reinterpret_cast<uint4*>(to + threadIdx.x % 4 * 8) = {words[0], words[1], words[2], words[3]};
}

// One row of a half's columns, exchanged among four lanes: a warp stores 64 bytes of each row at
// once.
template <class C, Type kTo>
__device__ __forceinline__ void store_row(uint16_t* to, bool valid, int r,
                                          const float (&out)[C::kValueColumns / 2], float factor) {
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

// A power of two such that `most` is less than two of it.
__device__ __forceinline__ uint32_t unit_bits(float most) {
  return min(max(__float_as_uint(most) & 0x7f800000u, 1u << 23), 253u << 23);
}

// The largest value of row r of the half, over the four lanes that have it.
template <class C>
__device__ __forceinline__ float largest(const float (&out)[C::kValueColumns / 2], int r) {
  float most = 0;
#pragma unroll
  for (int i = 0; i < C::kValueColumns / 8; ++i) {
    most = fmaxf(most, fmaxf(fabsf(out[4 * i + 2 * r]), fabsf(out[4 * i + 2 * r + 1])));
  }
  most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
  return fmaxf(most, __shfl_xor_sync(~0u, most, 2));
}

// One row of partial results as f16, in multiples of a unit.
template <class C>
__device__ __forceinline__ void store_partial_row(const MlaDecodeParams& params,
                                                  const RowTile& tile, int half, int r,
                                                  const float (&out)[C::kValueColumns / 2],
                                                  float inverse) {
  const uint32_t unit = unit_bits(largest<C>(out, r) * inverse);
  const float factor = inverse * __uint_as_float((254u << 23) - unit);
  const int row = thread_row(r);
  const int64_t place = part_row<C>(tile, row);
  const bool valid = row < tile.rows;
  if (valid && threadIdx.x % 4 == 0) {
    params.work.partial_units[2 * place + half] = __uint_as_float(unit);
  }
  store_row<C, f16>(
      static_cast<uint16_t*>(params.work.partial_out) + place * C::kRank + half * C::kValueColumns,
      valid, r, out, factor);
}

// Where the columns of a half go.
template <class C>
__device__ __forceinline__ uint16_t* output_row(const MlaDecodeParams& params, const RowTile& tile,
                                                int half, int row) {
  const int packed = tile.first_row + row;
  const int64_t token = tile.view.q_begin + packed / params.q_heads;
  return static_cast<uint16_t*>(params.out) + token * params.out_token_stride +
         packed % params.q_heads * params.out_head_stride + half * C::kValueColumns;
}

template <class C>
__device__ __forceinline__ void store_output_row(const MlaDecodeParams& params, const RowTile& tile,
                                                 int half, int r,
                                                 const float (&out)[C::kValueColumns / 2],
                                                 float inverse) {
  const int row = thread_row(r);
  const bool valid = row < tile.rows;
  store_row<C, C::kQ>(output_row<C>(params, tile, half, valid ? row : 0), valid, r, out, inverse);
}

template <class C>
__device__ __forceinline__ void store_values(const MlaDecodeParams& params, const RowTile& tile,
                                             int half, const float (&out)[C::kValueColumns / 2],
                                             const float (&inverse)[2]) {
  if (tile.item.partial >= 0) {
#pragma unroll
    for (int r = 0; r < 2; ++r) store_partial_row<C>(params, tile, half, r, out, inverse[r]);
  } else {
#pragma unroll
    for (int r = 0; r < 2; ++r) store_output_row<C>(params, tile, half, r, out, inverse[r]);
  }
}

}  // namespace fovea::kernels::cuda
