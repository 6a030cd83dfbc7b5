// SPDX-License-Identifier: Apache-2.0
// Reads memory with bulk copies into a ring of shared-memory tiles that nobody looks at: the read
// bandwidth ceiling of a kernel that loads by the copy engine. One thread of one block per SM.
#pragma once

#include "kernels/cuda/common/measure_params.h"

namespace fovea::kernels::cuda {

template <int kTileBytes, int kStages>
struct ReadBulkConfig {
  using Params = ReadParams;
  static constexpr int kBlocksPerSm = 1;
  static constexpr KernelTraits kTraits = {32, kTileBytes* kStages, 0, 0};

  __device__ static void run(const Params& params) {
    extern __shared__ __align__(128) unsigned char tiles[];
    __shared__ uint64_t arrived[kStages];
    if (threadIdx.x != 0) return;
    const auto barrier = [&](int stage) {
      return static_cast<uint32_t>(__cvta_generic_to_shared(arrived + stage));
    };
    const auto* data = static_cast<const unsigned char*>(params.data);
    const int64_t count = params.bytes / kTileBytes;
    const auto load = [&](int stage, int64_t tile) {
      asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier(stage)),
                   "r"(kTileBytes)
                   : "memory");
      asm volatile(
          "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
              static_cast<uint32_t>(__cvta_generic_to_shared(tiles + stage * kTileBytes))),
          "l"(data + tile * kTileBytes), "r"(kTileBytes), "r"(barrier(stage))
          : "memory");
    };
    const auto wait = [&](int stage, uint32_t phase) {
      uint32_t done = 0;
      while (!done) {
        asm volatile(
            "{.reg .pred p;\nmbarrier.try_wait.parity.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;}"
            : "=r"(done)
            : "r"(barrier(stage)), "r"(phase)
            : "memory");
      }
    };
    for (int stage = 0; stage < kStages; ++stage) {
      asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(barrier(stage)) : "memory");
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    int64_t next = blockIdx.x;
    for (int stage = 0; stage < kStages && next < count; ++stage, next += gridDim.x) {
      load(stage, next);
    }
    int stage = 0;
    uint32_t phase = 0;
    for (int64_t tile = blockIdx.x; tile < count; tile += gridDim.x, next += gridDim.x) {
      wait(stage, phase);
      if (next < count) load(stage, next);
      if (++stage == kStages) {
        stage = 0;
        phase ^= 1;
      }
    }
  }
};

template <int kTileBytes, int kStages>
using Config = ReadBulkConfig<kTileBytes, kStages>;

}  // namespace fovea::kernels::cuda
