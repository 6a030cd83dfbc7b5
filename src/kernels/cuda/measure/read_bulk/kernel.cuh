// SPDX-License-Identifier: Apache-2.0
// Reads memory with bulk copies into a ring of shared-memory tiles that nothing reads: the ceiling
// of the read bandwidth of kernels that load by bulk copies. Uses one thread of one block per SM.
#pragma once

#include "kernels/cuda/common/hopper.cuh"
#include "kernels/cuda/common/measure_params.h"

namespace fovea::kernels::cuda {

template <int kTileBytes, int kStages>
struct Config {
  using Params = ReadParams;
  static constexpr int kBlocksPerSm = 1;
  static constexpr KernelTraits kTraits = {32, kTileBytes* kStages, 0, 0};

  __device__ static void run(const Params& params) {
    extern __shared__ __align__(128) unsigned char tiles[];
    __shared__ TransactionBarrier arrived[kStages];
    if (threadIdx.x != 0) return;
    const auto* data = static_cast<const unsigned char*>(params.data);
    const int64_t count = params.bytes / kTileBytes;
    const auto load = [&](int stage, int64_t tile) {
      arrived[stage].arrive_expecting(kTileBytes);
      load_bytes(tiles + stage * kTileBytes, data + tile * kTileBytes, kTileBytes, arrived[stage]);
    };
    for (TransactionBarrier& barrier : arrived) barrier.init(1);
    fence_barrier_init();
    int64_t next = blockIdx.x;
    for (int stage = 0; stage < kStages && next < count; ++stage, next += gridDim.x) {
      load(stage, next);
    }
    int stage = 0;
    uint32_t phase = 0;
    for (int64_t tile = blockIdx.x; tile < count; tile += gridDim.x, next += gridDim.x) {
      arrived[stage].wait(phase);
      if (next < count) load(stage, next);
      if (++stage == kStages) {
        stage = 0;
        phase ^= 1;
      }
    }
  }
};

}  // namespace fovea::kernels::cuda
