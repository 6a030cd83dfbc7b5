// SPDX-License-Identifier: Apache-2.0
// The products of a consumer warpgroup.
#pragma once

#include "kernels/cuda/sm90/narrow_gemm/config.cuh"

namespace fovea::kernels::cuda {

// sums[64, kRows] = the warpgroup's rows of the weight times x, over the block's part of k. Arrives
// at the barrier of the cluster before the last step, when the other blocks may send sums.
template <int kRows, int kGroups>
__device__ __forceinline__ void multiply(typename NarrowTiles<kRows, kGroups>::SharedMemory& shared,
                                         const Part& part, int group, float (&sums)[kRows / 2]) {
  using Shape = NarrowTiles<kRows, kGroups>;
#pragma unroll
  for (int i = 0; i < kRows / 2; ++i) sums[i] = 0;
  Ring<Shape::kStages> weights;
  Ring<Shape::kBoxes> boxes;
  if (part.splits > 1 && part.steps == 0) cluster_arrive();
#pragma unroll 1
  for (int i = 0; i < part.steps; ++i, weights.advance()) {
    if (part.splits > 1 && i + 1 == part.steps) cluster_arrive();
    const auto& stage = shared.stages.weight[part.place_of(i, Shape::kStages)];
    shared.weight_full[weights.stage].wait(weights.phase);
#pragma unroll
    for (int box = 0; box < kStageBoxes; ++box, boxes.advance()) {
      shared.x_full[boxes.stage].wait(boxes.phase);
      products_begin();
      const uint64_t weight = rows_descriptor(shared_address(stage[box][group * kGroupColumns]));
      const uint64_t x = rows_descriptor(shared_address(shared.stages.x[boxes.stage]));
#pragma unroll
      for (int step = 0; step < kBoxDepth / 16; ++step) {
        Product<kRows>::template run<bf16, false>(sums, moved(weight, step * 32),
                                                  moved(x, step * 32), true);
      }
      products_commit();
      products_wait<1>();  // the box before is multiplied
      if (threadIdx.x % 32 == 0 && i + box > 0) shared.empty[boxes.previous().stage].arrive();
    }
  }
  products_wait<0>();
  products_landed(sums);
}

}  // namespace fovea::kernels::cuda
