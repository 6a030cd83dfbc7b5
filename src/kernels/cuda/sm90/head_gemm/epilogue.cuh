// SPDX-License-Identifier: Apache-2.0
// Sums to the rows of live tokens: through shared memory, so that neighbouring threads store neighbouring bytes.
#pragma once

#include "kernels/cuda/sm90/head_gemm/config.cuh"

namespace fovea::kernels::cuda {

// A consumer.
template <int kRows, bool kIsKn, Type kType>
__device__ __forceinline__ void store(const HopperHeadGemmParams& params,
                                      typename Tiles<kRows, kIsKn>::SharedMemory& shared, int consumer,
                                      const Tile& tile, int live,
                                      const float (&sums)[Tiles<kRows, kIsKn>::kColumns / 2]) {
  using Shape = Tiles<kRows, kIsKn>;
  constexpr int kChunk = 8;  // elements of 16 bytes
  const int barrier = 1 + consumer;
  const int thread = threadIdx.x % kWarpgroupThreads;
  const int lane = threadIdx.x % 32;
  const int own_row = thread / 32 * 16 + lane % 16;
  auto& staged = shared.out[consumer];
  named_barrier_wait(barrier, kWarpgroupThreads);  // the last tile's have been read
#pragma unroll
  for (int j = 0; j < Shape::kColumns / 8; j += 2) {
    const float* v = sums + 4 * j;
    const uint32_t piece[4] = {pack<kType>(v[0], v[1]), pack<kType>(v[2], v[3]), pack<kType>(v[4], v[5]),
                               pack<kType>(v[6], v[7])};
    store_matrices(&staged[j / 8][own_row][((j % 8 + lane / 16) ^ own_row % 8) * kChunk], piece);
  }
  named_barrier_wait(barrier, kWarpgroupThreads);
  constexpr int kRowChunks = Shape::kColumns / kChunk;
  constexpr int kRowsAtOnce = kWarpgroupThreads / kRowChunks;
  const int chunk = thread % kRowChunks;
  const int column = tile.column + Shape::first_column(consumer) + chunk * kChunk;
  const int row = thread / kRowChunks;  // and every kRowsAtOnce-th
  const int token = shared.live.row(params, tile.row_tile) + Shape::first_row(consumer) + row;
  unsigned stored = 0;  // a bit for each
#pragma unroll
  for (int i = 0; i < kGroupRows / kRowsAtOnce; ++i) {
    const int at = token + i * kRowsAtOnce;
    const bool alive = column < params.n && at < live && !(params.skip && params.skip[at]);
    stored |= alive ? 1u << i : 0;
  }
  uint16_t* const out = static_cast<uint16_t*>(params.out) + token * params.out_token_stride +
                        tile.head * params.out_head_stride + column;
#pragma unroll
  for (int i = 0; i < kGroupRows / kRowsAtOnce; ++i) {
    const int at = row + i * kRowsAtOnce;
    const uint4 values = *reinterpret_cast<const uint4*>(&staged[chunk / 8][at][(chunk % 8 ^ at % 8) * kChunk]);
    if (stored >> i & 1) *reinterpret_cast<uint4*>(out + i * kRowsAtOnce * params.out_token_stride) = values;
  }
}

}  // namespace fovea::kernels::cuda
