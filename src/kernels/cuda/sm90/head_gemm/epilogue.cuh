// SPDX-License-Identifier: Apache-2.0
// Stores sums to the rows of live tokens: through shared memory, so that neighbouring threads store
// neighbouring bytes.
#pragma once

#include "kernels/cuda/sm90/head_gemm/config.cuh"

namespace fovea::kernels::cuda {

// One consumer warpgroup.
template <int kRows, bool kIsKn, Type kType>
__device__ __forceinline__ void store(const HopperHeadGemmParams& params,
                                      typename Tiles<kRows, kIsKn>::SharedMemory& shared,
                                      int consumer, const Tile& tile, int live,
                                      const float (&sums)[Tiles<kRows, kIsKn>::kColumns / 2]) {
  using Shape = Tiles<kRows, kIsKn>;
  constexpr int kChunk = 8;  // elements of 16 bytes
  const int barrier = first_consumer + consumer;
  const int thread = threadIdx.x % kWarpgroupThreads;
  const int lane = threadIdx.x % 32;
  const int own_row = thread / 32 * 16 + lane % 16;
  auto& staged = shared.out[consumer];
  named_barrier_wait(barrier, kWarpgroupThreads);  // the last tile's sums have been read
#pragma unroll
  for (int j = 0; j < Shape::kColumns / 8; j += 2) {
    const float* v = sums + 4 * j;
    const uint32_t piece[4] = {pack<kType>(v[0], v[1]), pack<kType>(v[2], v[3]),
                               pack<kType>(v[4], v[5]), pack<kType>(v[6], v[7])};
    store_matrices(&staged[j / 8][own_row][((j % 8 + lane / 16) ^ own_row % 8) * kChunk], piece);
  }
  named_barrier_wait(barrier, kWarpgroupThreads);
  constexpr int kRowChunks = Shape::kColumns / kChunk;
  const int chunk = thread % kRowChunks;
  const int column = tile.column + Shape::first_column(consumer) + chunk * kChunk;
  if (column >= params.n) return;
  const int first_row = shared.live.row(params, tile.row_tile) + Shape::first_row(consumer);
  uint16_t* const out =
      static_cast<uint16_t*>(params.out) + tile.head * params.out_head_stride + column;
  const auto store_rows = [&](auto skips) {
#pragma unroll
    for (int row = thread / kRowChunks; row < kGroupRows; row += kWarpgroupThreads / kRowChunks) {
      const int token = first_row + row;
      if (token >= live) break;
      if (skips(token)) continue;
      *reinterpret_cast<uint4*>(out + token * params.out_token_stride) =
          *reinterpret_cast<const uint4*>(&staged[chunk / 8][row][(chunk % 8 ^ row % 8) * kChunk]);
    }
  };
  if (params.skip) {
    store_rows([&](int token) { return params.skip[token] != 0; });
  } else {
    store_rows([](int) { return false; });
  }
}

}  // namespace fovea::kernels::cuda
