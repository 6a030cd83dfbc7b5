// SPDX-License-Identifier: Apache-2.0
// The products of a consumer warpgroup.
#pragma once

#include "kernels/cuda/sm90/narrow_gemm/config.cuh"

namespace fovea::kernels::cuda {

// sums[64, kRows] = the warpgroup's rows of the weight times x, over the block's part of k.
template <int kRows, int kGroups>
__device__ __forceinline__ void multiply(typename NarrowTiles<kRows, kGroups>::SharedMemory& shared,
                                         const Part& part, int group, float (&sums)[kRows / 2]) {
  using Shape = NarrowTiles<kRows, kGroups>;
#pragma unroll
  for (int i = 0; i < kRows / 2; ++i) sums[i] = 0;
  Ring<Shape::kStages> ring;
#pragma unroll 1
  for (int i = 0; i < part.steps; ++i, ring.advance()) {
    const auto& stage = shared.stages[ring.stage];
    shared.full[ring.stage].wait(ring.phase);
    products_begin();
#pragma unroll
    for (int box = 0; box < kStageBoxes; ++box) {
      const uint64_t weight =
          rows_descriptor(shared_address(stage.weight[box][group * kGroupColumns]));
      const uint64_t x = rows_descriptor(shared_address(stage.x[box]));
#pragma unroll
      for (int step = 0; step < kBoxDepth / 16; ++step) {
        Product<kRows>::template run<bf16, false>(sums, moved(weight, step * 32),
                                                  moved(x, step * 32), true);
      }
    }
    products_commit();
    products_wait<0>();
    products_landed(sums);
    if (threadIdx.x % 32 == 0) shared.empty[ring.stage].arrive();
  }
}

}  // namespace fovea::kernels::cuda
