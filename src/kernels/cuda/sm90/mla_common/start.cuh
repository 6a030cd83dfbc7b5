// SPDX-License-Identifier: Apache-2.0
// How a block starts: tensor maps and the first work item are read before the wait for the
// preceding kernel, where that is safe.
#pragma once

#include "kernels/cuda/sm90/mla_common/load_boxes.cuh"
#include "kernels/cuda/sm90/mla_common/queries.cuh"

namespace fovea::kernels::cuda {

// Every launch has its own tensor maps, which the copy engine reads before its first box.
constexpr int kMapsThread = 96;  // in the producer's last warp
template <class C>
__device__ __forceinline__ void prefetch_maps(const MlaDecodeParams& params) {
  prefetch_tensor_map(params.q_latent_map);
  if constexpr (C::kKeys == pages) prefetch_tensor_map(params.cache_map);
  if constexpr (C::kRopeTiles > 0) {
    prefetch_tensor_map(params.q_rope_map);
    if constexpr (C::kKeys == pages) prefetch_tensor_map(params.cache_rope_map);
  }
}

// Returns how many threads of the producer read the block's range of the list.
constexpr int list_threads(Keys keys) { return keys == pages ? 96 : 1; }

// Returns how many threads of the producer do not wait for the preceding kernel when the block
// starts, once the list is complete. No launch starts before the preceding one allows it or has
// ended, and the first attention of a plan waited for the list and the page table before it allowed
// any. Later ones find both complete, as well as keys of earlier passes where the caller guarantees
// those. Other tensors (q, the pass's own keys) are complete only after the wait; the warps of the
// producer wait once they know what to copy.
constexpr int early_threads(Keys keys) {
  return keys == pages ? list_threads(keys) : kWarpgroupThreads;
}

// A producer warpgroup over pages: one warp for keys, one thread for queries and all items but the
// first, one thread for the first item. All three have read `first`.
template <class C>
__device__ __forceinline__ void produce_boxes(const MlaDecodeParams& params,
                                              typename C::SharedMemory& shared,
                                              const FirstWork& first) {
  const int warp = threadIdx.x / 32;
  if (warp == 0) {
    BoxProducer<C>{params, shared, first}.run();
  } else if (threadIdx.x == 32) {
    produce_queries<C>(params, shared, first, true);
  } else if (threadIdx.x == 64 && first.exists()) {
    announce_tile<C>(params, shared, &first.item, {}, first.rank<C>());
  }
}

}  // namespace fovea::kernels::cuda
