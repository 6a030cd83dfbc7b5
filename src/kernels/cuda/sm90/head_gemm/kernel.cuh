// SPDX-License-Identifier: Apache-2.0
// Multiplies every head's rows with its own matrix, for enough rows to fill a warpgroup's products.
// Blocks are persistent.
//
//   warp 8          producer | W[k] | waits for the preceding kernel | x[k] | x, W[k] of the next
//   tile warpgroups 0-1                                                          | x W[k] | stores
//   | ...
//
// Barriers: full (producer and copies -> all), empty (8 warps -> producer).
#pragma once

#include "kernels/cuda/sm90/head_gemm/epilogue.cuh"
#include "kernels/cuda/sm90/head_gemm/load.cuh"
#include "kernels/cuda/sm90/head_gemm/mainloop.cuh"

namespace fovea::kernels::cuda {

template <int kRows, bool kIsKn, Type kType>
struct HopperHeadGemmConfig {
  using Params = HopperHeadGemmParams;
  using Shape = Tiles<kRows, kIsKn>;
  using SharedMemory = typename Shape::SharedMemory;
  static constexpr int kBlocksPerSm = 1;
  static constexpr KernelTraits kTraits = {kThreads, sizeof(SharedMemory), kRows, kTileColumns};
  static_assert(sizeof(SharedMemory) <= kMaxSharedBytes);

  __device__ static void run(const Params& params) {
    extern __shared__ __align__(1024) char dynamic_shared[];
    auto& shared = *reinterpret_cast<SharedMemory*>(dynamic_shared);
    const int consumer = threadIdx.x / kWarpgroupThreads;
    const bool produces = consumer == kConsumers && threadIdx.x % 32 == 0;
    const Producer<kRows, kIsKn> producer{params, shared};
    if (produces) {
      for (int i = 0; i < Shape::kStages; ++i) {
        shared.full[i].init(1);
        shared.empty[i].init(kConsumers * 4);
      }
      fence_barrier_init();
      producer.load_early_weights();
    }
    __syncthreads();
    wait_and_allow_next();
    const int live = min(*params.live_tokens, params.tokens);
    const auto row_tiles = [&] {
      return params.skip ? shared.live.count : (live + kRows - 1) / kRows;
    };
    if (consumer == kConsumers) {
      typename Producer<kRows, kIsKn>::Step next(params);
      if (produces) next = producer.load_early_rows();
      if (params.skip) shared.live.find(params.skip, live);
      if (produces) producer.load_others(next, row_tiles());
      return;
    }
    if (params.skip) shared.live.find(params.skip, live);
    Ring<Shape::kStages> ring;
    for (Tile tile(params); tile.template exists<Shape::kStages>(params, row_tiles());
         tile.advance(params)) {
      float sums[Shape::kColumns / 2];
      multiply<kRows, kIsKn, kType>(params, shared, consumer, ring, sums);
      store<kRows, kIsKn, kType>(params, shared, consumer, tile, live, sums);
    }
  }
};

template <int kRows, bool kIsKn, Type kType>
using Config = HopperHeadGemmConfig<kRows, kIsKn, kType>;

}  // namespace fovea::kernels::cuda
