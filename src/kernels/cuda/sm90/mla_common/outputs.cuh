// SPDX-License-Identifier: Apache-2.0
// How accumulated rows are written: exchanged among the lanes of a row so that stores are wide, and
// partial results as f16 in multiples of a power of two.
#pragma once

#include "kernels/cuda/sm90/mla_common/tiles.cuh"

namespace fovea::kernels::cuda {

// Transposes four registers of each of the four lanes of a row.
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

// Stores four words of each of the four lanes of a row to the row's next 64 bytes.
__device__ __forceinline__ void store_words(uint16_t* to, bool valid, uint32_t (&words)[4]) {
  transpose_quad(words);
  if (!valid) return;
  *reinterpret_cast<uint4*>(to + threadIdx.x % 4 * 8) = {words[0], words[1], words[2], words[3]};
}

// The bits of a power of two such that `largest` is less than twice it.
__device__ __forceinline__ uint32_t unit_bits(float largest) {
  return min(max(__float_as_uint(largest) & 0x7f800000u, 1u << 23), 253u << 23);
}
// 1 / unit.
__device__ __forceinline__ float inverse_unit(uint32_t unit) {
  return __uint_as_float((254u << 23) - unit);
}

}  // namespace fovea::kernels::cuda
