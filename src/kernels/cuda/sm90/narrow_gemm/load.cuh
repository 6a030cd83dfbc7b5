// SPDX-License-Identifier: Apache-2.0
// The producer: one thread copies tiles of the weight and of x into their rings.
#pragma once

#include "kernels/cuda/sm90/narrow_gemm/config.cuh"

namespace fovea::kernels::cuda {

template <int kRows, int kGroups>
struct Producer {
  using Shape = NarrowTiles<kRows, kGroups>;
  const NarrowGemmParams& params;
  typename Shape::SharedMemory& shared;
  const Part& part;

  // The weight is read once, so its lines leave the L2 cache first.
  __device__ __forceinline__ void copy_weight(int i) const {
    TransactionBarrier& full = shared.weight_full[i % Shape::kStages];
    auto& weight = shared.stages.weight[part.place_of(i, Shape::kStages)];
    full.arrive_expecting(sizeof(weight));
#pragma unroll
    for (int box = 0; box < kStageBoxes; ++box) {
      load_box(weight[box], params.weight, full, kEvictFirst, part.depth_of(i * kStageBoxes + box),
               0, 0, part.tile * (Shape::kColumns / 16));
    }
  }
  __device__ __forceinline__ void copy_x(int box) const {
    TransactionBarrier& full = shared.x_full[box % Shape::kBoxes];
    auto& x = shared.stages.x[box % Shape::kBoxes];
    full.arrive_expecting(sizeof(x));
    load_box(x, params.x, full, part.depth_of(box), 0);
  }

  // Fills the ring with the weight, which no kernel writes.
  __device__ __forceinline__ void load_early() const {
#pragma unroll 1
    for (int i = 0; i < min(part.steps, Shape::kStages); ++i) copy_weight(i);
  }
  // Called after the preceding kernel has ended. A box of x that is given back is the last of its
  // step if its number is odd, and gives back the weight as well.
  __device__ __forceinline__ void load_others() const {
    const int boxes = part.steps * kStageBoxes;
#pragma unroll 1
    for (int box = 0; box < min(boxes, Shape::kBoxes); ++box) copy_x(box);
    Ring<Shape::kBoxes> ring;
#pragma unroll 1
    for (int box = 0; box + Shape::kBoxes < boxes; ++box, ring.advance()) {
      shared.empty[ring.stage].wait(ring.phase);
      copy_x(box + Shape::kBoxes);
      const int next = box / kStageBoxes + Shape::kStages;
      if (box % kStageBoxes == kStageBoxes - 1 && next < part.steps) copy_weight(next);
    }
  }
};

}  // namespace fovea::kernels::cuda
