// SPDX-License-Identifier: Apache-2.0
// Absorbed MLA decode on Hopper for 16 or 32 rows a block over fp8 caches. Rows stay fp8 in shared
// memory. Two warpgroups take key tiles alternately; each converts them to f16 in registers, as
// left operands of both products: keys are rows of the scores, value columns are rows of the
// output. One warpgroup multiplies while the other computes weights. At the end of an item they
// join their sums.
//
//   warpgroup 0   producer: a warp that loads key rows, a thread for work items and queries
//   warpgroup 1   | QK[0] | softmax[0] | P[0]*V[0] | QK[2]     | softmax[2] | ...
//   warpgroup 2           | QK[1]      | softmax[1] | P[1]*V[1] | QK[3]     | ...
//
// Barriers: tile_full/tile_empty (work items, to all roles), full/empty of a stage, which holds a
// whole key tile, q_full/q_empty, and the named barriers of config.cuh.
#pragma once

#include "kernels/cuda/sm90/mla_decode_fp8_narrow/mainloop.cuh"

namespace fovea::kernels::cuda {

template <class C>
__device__ __forceinline__ void init_barriers(typename C::SharedMemory& shared) {
  for (int i = 0; i < C::kStages; ++i) {
    shared.full[i].init(1);
    shared.empty[i].init(4);
  }
  for (int i = 0; i < kTileSlots; ++i) {
    shared.tile_full[i].init(1);
    shared.tile_empty[i].init(8 + 1);
  }
  shared.q_full.init(1);
  shared.q_empty.init(8);
  fence_barrier_init();
}

template <int kRank, int kRope, Type kQuery, Keys kCache, int kRowTile>
__device__ void MlaDecodeFp8NarrowConfig<kRank, kRope, kQuery, kCache, kRowTile>::run(
    const MlaDecodeParams& params) {
  using C = MlaDecodeFp8NarrowConfig;
  extern __shared__ __align__(1024) char dynamic_shared[];
  auto& shared = *reinterpret_cast<SharedMemory*>(dynamic_shared);
  if (threadIdx.x == 0) init_barriers<C>(shared);
  __syncthreads();
  wait_for_previous_kernel();
  allow_next_kernel();
  const int warpgroup = threadIdx.x / kWarpgroupThreads;
  if (warpgroup == 0) {
    give_registers<kProducerRegisters>();
    if (threadIdx.x / 32 == 0) {
      load_rows<C>(params, shared);
    } else if (threadIdx.x == 32) {
      FirstWork first;
      first.read(params.ranges[blockIdx.x / C::kBlocks]);
      produce_queries<C>(params, shared, first, false);
    }
  } else {
    take_registers<kConsumerRegisters>();
    Consumer<C>(params, shared, warpgroup - 1).run();
  }
}

template <int kRank, int kRope, Type kQuery, Keys kCache, int kRowTile>
using Config = MlaDecodeFp8NarrowConfig<kRank, kRope, kQuery, kCache, kRowTile>;

}  // namespace fovea::kernels::cuda
