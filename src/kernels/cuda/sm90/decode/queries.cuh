// SPDX-License-Identifier: Apache-2.0
// Loads rows of q into registers.
#pragma once

#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/sm90/decode/load.cuh"

namespace fovea::kernels::cuda {

// The query rows of a warp's head as right operands: lane l has row l / 4 of every eight.
template <class C>
struct Queries {
  uint32_t fragments[C::kHeadDim / 16][C::kColumns][2];

  // Reads the rows without converting them. With an fp8 cache the four values of a fragment are
  // adjacent, which is the order of fp8 values in a register.
  __device__ void read(const DecodeParams& params, const Tile& tile) {
    const int lane = threadIdx.x % 32;
    const int head = Steps<C>(tile.item).head_of(static_cast<int>(threadIdx.x) / 32);
#pragma unroll
    for (int n = 0; n < C::kColumns; ++n) {
      const int row = n * 8 + lane / 4;
      const bool valid = row < tile.rows;
      const auto* q = static_cast<const uint16_t*>(params.q);
      if (valid) {
        q += (tile.view.q_begin + tile.token_of(row)) * params.q_token_stride +
             tile.q_head_of(head, row) * params.q_head_stride;
      }
#pragma unroll
      for (int d = 0; d < C::kHeadDim; d += 16) {
        uint32_t(&pair)[2] = fragments[d / 16][n];
        const int column = d + lane % 4 * (C::kFp8 ? 4 : 2);
        const bool live = valid && d < params.head_dim;
        pair[0] = pair[1] = 0;
        if constexpr (C::kFp8) {
          if (live && column < params.head_dim) {
            const uint2 four = *reinterpret_cast<const uint2*>(q + column);
            pair[0] = four.x;
            pair[1] = four.y;
          }
        } else {
          if (live) pair[0] = *reinterpret_cast<const uint32_t*>(q + column);
          if (live && d + 8 < params.head_dim)
            pair[1] = *reinterpret_cast<const uint32_t*>(q + column + 8);
        }
      }
    }
  }

  // With an fp8 cache: converts the rows to f16, relative to a power of two near the row's largest
  // value. unit[n] is that power for row 8n + lane / 4.
  __device__ void normalise(float (&unit)[C::kColumns]) {
#pragma unroll
    for (int n = 0; n < C::kColumns; ++n) {
      float most = 0;
#pragma unroll
      for (int d = 0; d < C::kHeadDim / 16; ++d) {
#pragma unroll
        for (const uint32_t two : fragments[d][n]) {
          const float2 values = unpack<C::kQ>(two);
          most = fmaxf(most, fmaxf(fabsf(values.x), fabsf(values.y)));
        }
      }
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
      // Keeps the exponent only: 2^e <= most < 2^(e + 1).
      unit[n] = __int_as_float(__float_as_int(most) & 0x7f800000);
      if (!(unit[n] > 0) || unit[n] == infinity()) unit[n] = 1;
      const float factor = 1 / unit[n];
#pragma unroll
      for (int d = 0; d < C::kHeadDim / 16; ++d) {
#pragma unroll
        for (uint32_t& two : fragments[d][n]) {
          const float2 values = unpack<C::kQ>(two);
          two = pack<f16>(values.x * factor, values.y * factor);
        }
      }
    }
  }
};

}  // namespace fovea::kernels::cuda
