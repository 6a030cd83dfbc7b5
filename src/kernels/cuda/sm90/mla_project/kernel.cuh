// SPDX-License-Identifier: Apache-2.0
// MLA's up-projection: keys and values of every head from latents. Persistent pairs of blocks; how many rows there are
// is known on the device only.
//
//   warp 8 (8-11)  producer   | L, half of W [k] | ... of the next tile while this one is stored
//   warpgroups 0-1 64 rows:   | L W^T  [k], one step ahead of the wait | staged | stored by the copy engine
//
// Barriers: full (producers and the pair's copies -> all), empty (8 warps of each block -> producer).
#pragma once

#include "kernels/cuda/sm90/mla_project/epilogue.cuh"
#include "kernels/cuda/sm90/mla_project/load.cuh"
#include "kernels/cuda/sm90/mla_project/mainloop.cuh"

namespace fovea::kernels::cuda {

// kGathers: the rows lie anywhere, as in a paged cache, and the threads of a warpgroup copy them.
template <Type kType, bool kGathers>
struct MlaProjectConfig {
  using Params = MlaProjectParams;
  static constexpr int kBlocksPerSm = 1;
  static constexpr KernelTraits kTraits = {kConsumers * kWarpgroupThreads + kProducerThreads<kGathers>,
                                           sizeof(SharedMemory), kRows, kSideColumns};
  static_assert(sizeof(SharedMemory) <= 232448);

  __device__ static void run(const Params& params) {
    extern __shared__ __align__(1024) char dynamic_shared[];
    auto& shared = *reinterpret_cast<SharedMemory*>(dynamic_shared);
    if (threadIdx.x == 0) {
      for (int i = 0; i < kStages; ++i) {
        shared.full[i].init(1 + (kGathers ? kWarpgroupThreads : 0));
        shared.empty[i].init(kBlocks * kConsumers * 4);
      }
      fence_barrier_init();
    }
    cluster_arrive();
    cluster_wait();
    wait_and_allow_next();
    const int rows = min(*params.live_rows, params.rows);
    const int tiles = (rows + kBlocks * kRows - 1) / (kBlocks * kRows) * params.heads;
    const int first = blockIdx.x / kBlocks;
    const int pairs = gridDim.x / kBlocks;
    const int consumer = threadIdx.x / kWarpgroupThreads;
    if (consumer == kConsumers) {
      if constexpr (kGathers) {
        gather(params, shared, first, tiles, pairs, rows);
      } else {
        if (threadIdx.x % 32 == 0) produce(params, shared, first, tiles, pairs);
        __syncwarp();
      }
    } else {
      Ring<kStages> ring;
      for (int n = first; n < tiles; n += pairs) {
        float sums[kColumns / 2];
        multiply<kType, kGathers>(params, shared, consumer, ring, sums);
        store<kType>(params, shared, consumer, tile_at(params, n), rows, sums);
      }
      if (threadIdx.x % kWarpgroupThreads == 0) wait_stores_read();
    }
    // The other block may still bring weights here, and give stages back.
    cluster_arrive();
    cluster_wait();
  }
};

template <Type kType, bool kGathers>
using Config = MlaProjectConfig<kType, kGathers>;

}  // namespace fovea::kernels::cuda
