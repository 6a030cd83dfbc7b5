// SPDX-License-Identifier: Apache-2.0
// The two products of a layer of experts for a few rows, which read the chosen experts once at the
// rate of the memory.
//
//   choices --> experts, in order --> weights --cp.async--> [piece 0|1|...] of each warp --> mma
//   x ---------------------------------------------------> registers ----------------------> mma
//   sums of 8 warps --> of the blocks of a cluster --> gates, or the sum over experts --> out
//
// A block of the first product has a tile of one expert; a block of the second has a tile of the
// outputs and all experts, and adds them in ascending order. The second reads the choices and
// begins to copy weights before the first has ended: the first lets it start only after the kernel
// that chose is complete.
#pragma once

#include "kernels/cuda/sm90/skinny_experts/choices.cuh"
#include "kernels/cuda/sm90/skinny_experts/epilogue.cuh"
#include "kernels/cuda/sm90/skinny_experts/mainloop.cuh"

namespace fovea::kernels::cuda {

template <Product kProduct, bool kIsKn, int kColumns, int kStages>
struct SkinnyExperts {
  using Params = SkinnyExpertsParams;
  using Tiles = ExpertTiles<kIsKn, kColumns, kStages>;
  using SharedMemory = typename Tiles::SharedMemory;
  static constexpr int kBlocksPerSm = Tiles::kBlocksPerSm;
  static constexpr KernelTraits kTraits = {kThreads, Tiles::kSharedBytes, kRows, kColumns};
  static constexpr int kTurn = 7;  // pieces between the first ones of neighbouring tiles

  // The first block of a cluster receives the sums of the others.
  __device__ __forceinline__ static void init_barrier(SharedMemory& shared, int rank, int bytes) {
    if (rank == 0 && threadIdx.x == 0) {
      shared.has_received.init(1);
      fence_barrier_init();
      shared.has_received.arrive_expecting(bytes);
    }
    cluster_arrive();
  }

  __device__ static void run(const Params& params) {
    extern __shared__ __align__(128) char dynamic_shared[];
    auto& shared = *reinterpret_cast<SharedMemory*>(dynamic_shared);
    const int rank = params.splits > 1 ? cluster_rank() : 0;
    const int tile = blockIdx.x / params.splits;
    ChoiceTable<kProduct, kIsKn, SharedMemory> table{params, shared};
    table.prepare();
    if constexpr (kProduct == gated) wait_and_allow_next();
    table.find();

    const int slot = kProduct == gated ? static_cast<int>(blockIdx.y) : 0;
    const int count = shared.chosen.count;
    if (kProduct == gated && slot >= count) return;  // all blocks of the cluster
    const int pieces = params.k / Tiles::kDepth;
    const int warps = kWarps * params.splits;
    Walk walk{shared.chosen,
              slot,
              kProduct == gated ? slot + 1 : count,
              0,
              pieces,
              rank * kWarps + static_cast<int>(threadIdx.x / 32),
              warps,
              tile * kTurn * warps % pieces};
    walk.start();
    const ExpertPieces<kProduct, kIsKn, kColumns, kStages> own(params, shared, tile);
    Walk next = walk;
    own.copy_first(next);

    ExpertOutputs<kProduct, kIsKn, kColumns, kStages> outputs(params, shared, tile, slot);
    if (params.splits > 1) init_barrier(shared, rank, outputs.received_bytes());
    outputs.load_bias();
    if constexpr (kProduct == combined) wait_and_allow_next();
    outputs.load_before();
    float sums[Tiles::kBlocks][4] = {};
    own.multiply(walk, next, sums);
    __syncthreads();  // all warps have read their pieces
    outputs.store_sums(sums);
    __syncthreads();
    if (params.splits > 1) cluster_wait();  // the first block has made its barrier
    const float2 sum = outputs.sum(rank);
    if (rank == 0) outputs.store(sum);
  }
};

// Chosen on H200, 2026-11-30.
template <Product kProduct, bool kIsKn>
using Config = SkinnyExperts<kProduct, kIsKn, kIsKn ? 64 : 32,
                             kProduct == combined ? 6
                             : kIsKn              ? 4
                                                  : 3>;

}  // namespace fovea::kernels::cuda
