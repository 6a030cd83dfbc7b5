// SPDX-License-Identifier: Apache-2.0
// Products of 9 to 64 rows with a matrix, which read the matrix once at the rate of the memory.
//
//   last warp   producer | weight | waits for the preceding kernel | x | weight, x of the next
//   steps warpgroups  factors of a norm | weight x | the other block's sums | sums to shared memory
//   | out
//
// The weight is the left operand, 64 of its rows a warpgroup, and rows of x are the columns of the
// instruction. The two blocks of a cluster share a tile's k: each sends the other the sums of half
// of the rows. Copies of the weight begin before the preceding kernel has ended.
// Barriers: full (producer and copies -> all), empty (warps -> producer), has_received (the other
// block -> all).
#pragma once

#include "kernels/cuda/sm90/narrow_gemm/epilogue.cuh"
#include "kernels/cuda/sm90/narrow_gemm/load.cuh"
#include "kernels/cuda/sm90/narrow_gemm/mainloop.cuh"

namespace fovea::kernels::cuda {

template <int kRows, int kGroups>
struct NarrowGemm {
  using Params = NarrowGemmParams;
  using Shape = NarrowTiles<kRows, kGroups>;
  using SharedMemory = typename Shape::SharedMemory;
  static constexpr int kBlocksPerSm = 1;
  static constexpr KernelTraits kTraits = {Shape::kThreads, sizeof(SharedMemory), kRows,
                                           Shape::kColumns};
  static_assert(sizeof(SharedMemory) <= kMaxSharedBytes);

  __device__ __forceinline__ static void produce(const Params& params, SharedMemory& shared,
                                                 const Part& part) {
    const Producer<kRows, kGroups> producer{params, shared, part};
    if (threadIdx.x % 32 == 0) {
      for (int i = 0; i < Shape::kStages; ++i) {
        shared.full[i].init(1);
        shared.empty[i].init(kGroups * 4);
      }
      shared.has_received.init(1);
      fence_barrier_init();
      if (params.splits > 1) shared.has_received.arrive_expecting(Shape::kReceivedBytes);
      producer.load_early();
    }
    __syncthreads();
    if (params.splits > 1) cluster_arrive();
    wait_and_allow_next();
    if (threadIdx.x % 32 == 0) producer.load_others();
    __syncwarp();
    if (params.splits > 1) cluster_wait();
  }

  __device__ __forceinline__ static void consume(const Params& params, SharedMemory& shared,
                                                 const Part& part, int group) {
    Epilogue<kRows, kGroups> epilogue{params, shared, part};
    __syncthreads();
    if (params.splits > 1) cluster_arrive();
    wait_and_allow_next();
    epilogue.find_factors();
    if (params.splits > 1) cluster_wait();  // the other block has made its barriers
    float sums[kRows / 2];
    multiply<kRows, kGroups>(shared, part, group, sums);
    epilogue.load_early();
    if constexpr (Shape::kReceived > 0) {
      if (params.splits > 1) epilogue.exchange(sums);
    }
    named_barrier_wait(consumers, Shape::kConsumers);  // all have read their stages
    epilogue.store_sums(group, sums);
    named_barrier_wait(consumers, Shape::kConsumers);
    epilogue.store_all();
  }

  __device__ static void run(const Params& params) {
    extern __shared__ __align__(1024) char dynamic_shared[];
    auto& shared = *reinterpret_cast<SharedMemory*>(dynamic_shared);
    const Part part(params);
    const int group = threadIdx.x / kWarpgroupThreads;
    if (group == kGroups) return produce(params, shared, part);
    consume(params, shared, part, group);
  }
};

template <int kRows, int kGroups>
using Config = NarrowGemm<kRows, kGroups>;

}  // namespace fovea::kernels::cuda
