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

// One row of partial results: pairs of lanes exchange columns until each has 16 bytes in a row.
template <class C>
__device__ __forceinline__ void store_partial_row(const MlaDecodeParams& params,
                                                  const RowTile& tile, int half, int r,
                                                  const float (&out)[C::kValueColumns / 2],
                                                  float inverse) {
  const int lane = threadIdx.x % 4;
  const int row = thread_row(r);
  float* to =
      params.work.partial_out +
      (static_cast<int64_t>(tile.item.partial) * (C::kBlocks * C::kRows) +
       block_rank<C>() * C::kRows + row) *
          C::kRank +
      half * C::kValueColumns + lane % 2 * 8 + lane / 2 * 4;
  const bool odd = lane & 1;
#pragma unroll
  for (int i = 0; i < C::kValueColumns / 8; i += 2) {
    const float even[2] = {out[4 * i + 2 * r] * inverse, out[4 * i + 2 * r + 1] * inverse};
    const float next[2] = {out[4 * i + 4 + 2 * r] * inverse, out[4 * i + 5 + 2 * r] * inverse};
    const float got0 = __shfl_xor_sync(~0u, odd ? even[0] : next[0], 1);
    const float got1 = __shfl_xor_sync(~0u, odd ? even[1] : next[1], 1);
    const float4 value =
        odd ? float4{got0, got1, next[0], next[1]} : float4{even[0], even[1], got0, got1};
    if (row < tile.rows) *reinterpret_cast<float4*>(to + i * 8) = value;
  }
}

// One row of the output, exchanged among four lanes: a warp stores 64 bytes of each row at once.
template <class C>
__device__ __forceinline__ void store_output_row(const MlaDecodeParams& params, const RowTile& tile,
                                                 int half, int r,
                                                 const float (&out)[C::kValueColumns / 2],
                                                 float inverse) {
  const int row = thread_row(r);
  const bool valid = row < tile.rows;
  const int packed = tile.first_row + (valid ? row : 0);
  const int64_t token = tile.view.q_begin + packed / params.batch.q_heads;
  uint16_t* to = static_cast<uint16_t*>(params.out) + token * params.out_token_stride +
                 packed % params.batch.q_heads * params.out_head_stride + half * C::kValueColumns +
                 threadIdx.x % 4 * 8;
#pragma unroll
  for (int i = 0; i < C::kValueColumns / 8; i += 4) {
    uint32_t words[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      words[k] = pack<C::kQ>(out[4 * (i + k) + 2 * r] * inverse,
                             out[4 * (i + k) + 2 * r + 1] * inverse);
    }
    transpose_quad(words);
    if (valid) *reinterpret_cast<uint4*>(to + i * 8) = {words[0], words[1], words[2], words[3]};
  }
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
