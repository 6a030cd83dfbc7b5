// SPDX-License-Identifier: Apache-2.0
// Sums to keys and values. Lanes of a row exchange what they have until each holds 16 bytes in a row.
#pragma once

#include "kernels/cuda/sm90/mla_project/mainloop.cuh"

namespace fovea::kernels::cuda {

// Four registers of each of four lanes, transposed.
__device__ __forceinline__ void transpose_quad(uint32_t (&w)[4]) {
  const bool odd = threadIdx.x & 1;
  const bool upper = threadIdx.x & 2;
  const uint32_t a = __shfl_xor_sync(~0u, odd ? w[0] : w[1], 1);
  const uint32_t b = __shfl_xor_sync(~0u, odd ? w[2] : w[3], 1);
  w[0] = odd ? a : w[0];
  w[1] = odd ? w[1] : a;
  w[2] = odd ? b : w[2];
  w[3] = odd ? w[3] : b;
  const uint32_t c = __shfl_xor_sync(~0u, upper ? w[0] : w[2], 2);
  const uint32_t d = __shfl_xor_sync(~0u, upper ? w[1] : w[3], 2);
  w[0] = upper ? c : w[0];
  w[1] = upper ? d : w[1];
  w[2] = upper ? w[2] : c;
  w[3] = upper ? w[3] : d;
}

// One of keys and values.
template <Type kType>
__device__ __forceinline__ void store(const float (&sums)[kColumns / 2], uint16_t* out,
                                      int64_t token_stride, int width, int row, int end) {
  const int lane = threadIdx.x % 4;
  row += threadIdx.x % kWarpgroupThreads / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint16_t* const to = out + (row + half * 8) * token_stride;
#pragma unroll
    for (int j = 0; j < kColumns / 8; j += 4) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = 4 * (j + i) + 2 * half;
        words[i] = pack<kType>(sums[at], sums[at + 1]);
      }
      transpose_quad(words);
      const int column = (j + lane) * 8;
      if (row + half * 8 < end && column < width) {
        *reinterpret_cast<uint4*>(to + column) = {words[0], words[1], words[2], words[3]};
      }
    }
  }
}

}  // namespace fovea::kernels::cuda
