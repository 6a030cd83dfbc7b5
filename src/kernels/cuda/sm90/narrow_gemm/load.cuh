// SPDX-License-Identifier: Apache-2.0
// The producer: one thread copies tiles of the weight and of x into the ring.
#pragma once

#include "kernels/cuda/sm90/narrow_gemm/config.cuh"

namespace fovea::kernels::cuda {

template <int kRows, int kGroups>
struct Producer {
  using Shape = NarrowTiles<kRows, kGroups>;
  const NarrowGemmParams& params;
  typename Shape::SharedMemory& shared;
  const Part& part;

  __device__ __forceinline__ int early_steps() const { return min(part.steps, Shape::kStages); }

  // The weight is read once, so its lines leave the L2 cache first.
  __device__ __forceinline__ void copy_weight(int stage, int i) const {
    shared.full[stage].arrive_expecting(sizeof(typename Shape::Stage));
#pragma unroll
    for (int box = 0; box < kStageBoxes; ++box) {
      load_box(shared.stages[stage].weight[box], params.weight, shared.full[stage], kEvictFirst,
               part.depth_of(i) + box * kBoxDepth, 0, 0, part.tile * (Shape::kColumns / 16));
    }
  }
  __device__ __forceinline__ void copy_x(int stage, int i) const {
#pragma unroll
    for (int box = 0; box < kStageBoxes; ++box) {
      load_box(shared.stages[stage].x[box], params.x, shared.full[stage],
               part.depth_of(i) + box * kBoxDepth, 0);
    }
  }

  // Fills the ring with the weight, which no kernel writes.
  __device__ __forceinline__ void load_early() const {
#pragma unroll 1
    for (int i = 0; i < early_steps(); ++i) copy_weight(i, i);
  }
  // Called after the preceding kernel has ended.
  __device__ __forceinline__ void load_others() const {
    const int early = early_steps();
#pragma unroll 1
    for (int i = 0; i < early; ++i) copy_x(i, i);
    auto ring = Ring<Shape::kStages>::at(early);
#pragma unroll 1
    for (int i = early; i < part.steps; ++i, ring.advance()) {
      shared.empty[ring.stage].wait(ring.phase ^ 1);
      copy_weight(ring.stage, i);
      copy_x(ring.stage, i);
    }
  }
};

}  // namespace fovea::kernels::cuda
