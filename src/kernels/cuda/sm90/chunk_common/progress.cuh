// SPDX-License-Identifier: Apache-2.0
// *_states follows *_chunks through a layer: it starts while *_chunks still runs, and loads the
// terms of a chunk once they are there.
#pragma once

#include "kernels/cuda/common/chunk_params.h"
#include "kernels/cuda/common/hopper.cuh"
#include "kernels/cuda/common/progress_counters.cuh"

namespace fovea::kernels::cuda {

// Counts at `counter` what this thread and others before a barrier have stored. Waits for this
// thread's stores by the copy engine.
__device__ __forceinline__ void publish(uint32_t* counter) {
  wait_stores();
  add_release(counter, 1);
}

// Counters of what `writers` publish, and `readers` wait for: all that read one of a walk's chunks.
struct Progress {
  uint32_t* counters;
  uint32_t writers, readers;

  // Waits until the first of `count` counters has its writers. Returns how many of the first 32
  // have, and counts as a reader of these. A warp calls this, and may then load what they stand for
  // by the copy engine.
  __device__ __forceinline__ int wait(int count) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    uint32_t* const own = counters + lane;
    unsigned missing = __ballot_sync(~0u, lane >= count || load_acquire(own) < writers);
    if (missing & 1) {
      while (lane == 0 && load_acquire(own) < writers) continue;
      missing = ~1u;
    }
    const int there = missing ? __ffs(static_cast<int>(missing)) - 1 : 32;
    if (lane < there) increment_relaxed(own, writers + readers - 1);
    fence_global_async_proxy();
    __syncwarp();
    return there;
  }
};

// A producer's other lanes wait here for the one that loads. Without this they would wait for the
// end of the preceding kernel, and the whole warp with them.
__device__ __forceinline__ void rejoin_lanes() { __syncwarp(); }

// Begins a kernel that follows the progress of the preceding one. Terms are read behind wait().
// Everything else was written by kernels that the preceding one waited for before it let this one
// start; the acquiring load drops what the multiprocessor may still hold of earlier contents.
__device__ __forceinline__ void begin_with_previous(const ChunkParams& params) {
  load_acquire(reinterpret_cast<const uint32_t*>(&params.plan.counts->walks));
  allow_next_kernel();
}

}  // namespace fovea::kernels::cuda
