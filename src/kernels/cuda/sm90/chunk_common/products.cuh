// SPDX-License-Identifier: Apache-2.0
// Products of a warpgroup with the tiles of a chunk. Left operands are registers or tiles, right
// operands are tiles.
#pragma once

#include "kernels/cuda/sm90/chunk_common/tiles.cuh"

namespace fovea::kernels::cuda {

// to = S keys^T
template <Type kType>
__device__ __forceinline__ void multiply_state(float (&to)[32], const uint32_t (&state)[32],
                                               const Tile (&keys)[kBoxes]) {
#pragma unroll
  for (int step = 0; step < kKeyDim / 16; ++step) {
    Product<kChunkTokens>::template run<kType, false>(
        to, state + 4 * step, moved(rows_descriptor(shared_address(keys[step / 4])), step % 4 * 32),
        step > 0);
  }
}

// to = left matrix^T, or added to it
template <Type kType>
__device__ __forceinline__ void multiply_tokens(float (&to)[32], const uint32_t (&left)[16],
                                                const Tile& matrix, bool add = false) {
  const uint64_t rows = rows_descriptor(shared_address(matrix));
#pragma unroll
  for (int step = 0; step < kChunkTokens / 16; ++step) {
    Product<kChunkTokens>::template run<kType, false>(to, left + 4 * step, moved(rows, step * 32),
                                                      add || step > 0);
  }
}

// state += kept keys
template <Type kType>
__device__ __forceinline__ void add_keys(float (&state)[64], const uint32_t (&kept)[16],
                                         const Tile (&keys)[kBoxes]) {
  const uint64_t columns = columns_descriptor(shared_address(keys[0]), sizeof(Tile));
#pragma unroll
  for (int step = 0; step < kChunkTokens / 16; ++step) {
    Product<kKeyDim>::template run<kType, true>(state, kept + 4 * step,
                                                moved(columns, step * 16 * 128), true);
  }
}

// to = a b^T for 16 of the summed columns, or added to it
template <Type kType>
__device__ __forceinline__ void multiply_rows(float (&to)[32], const Tile& a, const Tile& b,
                                              int step, bool add) {
  Product<kBlockValues>::template run<kType, false>(
      to, moved(rows_descriptor(shared_address(a)), step * 32),
      moved(rows_descriptor(shared_address(b)), step * 32), add);
}
template <Type kType>
__device__ __forceinline__ void multiply_rows(float (&to)[32], const Tile (&a)[kBoxes],
                                              const Tile (&b)[kBoxes]) {
#pragma unroll
  for (int step = 0; step < kKeyDim / 16; ++step) {
    multiply_rows<kType>(to, a[step / 4], b[step / 4], step % 4, step > 0);
  }
}

}  // namespace fovea::kernels::cuda
