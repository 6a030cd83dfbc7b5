// SPDX-License-Identifier: Apache-2.0
// Products of 9 to 128 rows with a matrix, which read the matrix once at the rate of the memory.
//
//   last warp   producer | weight | waits for the preceding kernel | x | weight, x of later steps
//   warpgroups  factors of a norm | weight x | sums of other blocks | sums to shared memory | out
//
// The weight is the left operand, 64 of its rows a warpgroup, and rows of x are the columns of the
// instruction. The blocks of a cluster share a tile's k: each sends the others the sums of the rows
// that they store. Copies of the weight begin before the preceding kernel has ended.
// Barriers: weight_full, x_full (producer and copies -> all), empty (warps -> producer, a box of x
// and at the end of a step the weight), has_received (other blocks -> all), and the cluster's: all
// have made their barriers; all may receive.
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
      for (auto& barrier : shared.weight_full) barrier.init(1);
      for (auto& barrier : shared.x_full) barrier.init(1);
      for (auto& barrier : shared.empty) barrier.init(kGroups * 4);
      shared.has_received.init(1);
      fence_barrier_init();
      producer.load_early();
    }
    __syncthreads();
    wait_and_allow_next();
    if (threadIdx.x % 32 == 0) producer.load_others();
    __syncwarp();
    if (params.splits == 1) return;
    cluster_arrive();
    cluster_wait();
  }

  __device__ __forceinline__ static void consume(const Params& params, SharedMemory& shared,
                                                 const Part& part, int group) {
    Epilogue<kRows, kGroups> epilogue{params, shared, part};
    __syncthreads();
    wait_and_allow_next();
    epilogue.find_factors();
    float sums[kRows / 2];
    multiply<kRows, kGroups>(shared, part, group, sums);
    epilogue.gather_sums(group, sums);
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
