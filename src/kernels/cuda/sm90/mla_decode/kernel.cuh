// SPDX-License-Identifier: Apache-2.0
// Absorbed MLA decode on Hopper: 64 rows of packed (token, head) pairs a block against a latent
// cache whose rows are keys and, but for the RoPE columns, values too. Persistent blocks; where
// requests have 128 rows two neighbours work side by side on the same keys.
//
//   warpgroup 0   producer: keys in half tiles L (columns 0..255) and R (256..511) and their RoPE
//   columns;
//                 work items and queries
//   warpgroup 1   scores     | QK[j] | softmax[j] | QK[j+1] | softmax[j+1] | ...
//   warpgroup 2   values L                        | P[j]*VL[j] | wait      | P[j+1]*VL[j+1] ...
//   warpgroup 3   values R                        | P[j]*VR[j] | wait      | P[j+1]*VR[j+1] ...
//
// Barriers: tile_full/tile_empty (work items, to all), full/empty of a half tile (producer ->
// scores; a value warpgroup -> producer), rope_full/rope_empty, q_full/q_empty,
// weights_full/weights_empty (scores -> values and back). A stage of the ring carries half of the
// queries at the start of an item.
#pragma once

#include "kernels/cuda/sm90/mla_decode/epilogue.cuh"
#include "kernels/cuda/sm90/mla_decode/load.cuh"
#include "kernels/cuda/sm90/mla_decode/mainloop.cuh"

namespace fovea::kernels::cuda {

template <class C>
__device__ __forceinline__ void run_producer(const MlaDecodeParams& params,
                                             typename C::SharedMemory& shared) {
  const int warp = threadIdx.x / 32;
  if constexpr (C::kLoader == rows) {
    produce_rows<C>(params, shared);
  } else if (warp == 0) {
    produce_keys<C>(params, shared);
  } else if (threadIdx.x == 32) {
    produce_queries<C>(params, shared);
  }
}

template <class C>
__device__ __forceinline__ void run_scores(const MlaDecodeParams& params,
                                           typename C::SharedMemory& shared) {
  Progress<C> at;
  TileReader<C> reader;
  while (true) {
    const RowTile& tile = reader.take(shared);
    if (tile.tiles < 0) return;
    if (tile.tiles > 0) {
      score_item<C>(params, shared, tile, at);
    } else {
      for (int half = 0; half < 2; ++half) store_lse<C>(params, tile, half, -infinity());
    }
    reader.give_back(shared);
  }
}

template <class C>
__device__ __forceinline__ void run_values(const MlaDecodeParams& params,
                                           typename C::SharedMemory& shared, int half) {
  Progress<C> at;
  TileReader<C> reader;
  while (true) {
    const RowTile& tile = reader.take(shared);
    if (tile.tiles < 0) return;
    float out[C::kValueColumns / 2] = {};
    float inverse[2] = {};
    value_item<C>(shared, tile.tiles, half, at, out, inverse);
    store_values<C>(params, tile, half, out, inverse);
    reader.give_back(shared);
  }
}

template <int kRank, int kRope, Type kQuery, Type kCache, Loader kLoader, int kBlocks>
__device__ void MlaDecodeConfig<kRank, kRope, kQuery, kCache, kLoader, kBlocks>::run(
    const MlaDecodeParams& params) {
  using C = MlaDecodeConfig;
  extern __shared__ __align__(1024) char dynamic_shared[];
  auto& shared = *reinterpret_cast<SharedMemory*>(dynamic_shared);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      shared.full[i].init(kFullArrivals);
      shared.empty[i].init(4);
    }
    shared.rope_full.init(kFullArrivals);
    shared.rope_empty.init(4);
    for (int i = 0; i < kTileSlots; ++i) {
      shared.tile_full[i].init(1);
      shared.tile_empty[i].init(12 + kKeyWarps);  // score, value and key warps
    }
    shared.q_full.init(1);
    shared.q_empty.init(4);
    for (int i = 0; i < 2; ++i) {
      shared.weights_full[i].init(4);
      shared.weights_empty[i].init(8);
    }
    fence_barrier_init();
  }
  __syncthreads();
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  const int warpgroup = threadIdx.x / kWarpgroupThreads;
  if (warpgroup == 0) {
    give_registers<kProducerRegisters>();
    run_producer<C>(params, shared);
  } else if (warpgroup == 1) {
    take_registers<kScoreRegisters>();
    run_scores<C>(params, shared);
  } else {
    take_registers<kValueRegisters>();
    run_values<C>(params, shared, warpgroup - 2);
  }
}

template <int kRank, int kRope, Type kQuery, Type kCache, Loader kLoader, int kBlocks>
using Config = MlaDecodeConfig<kRank, kRope, kQuery, kCache, kLoader, kBlocks>;

}  // namespace fovea::kernels::cuda
