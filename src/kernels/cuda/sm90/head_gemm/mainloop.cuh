// SPDX-License-Identifier: Apache-2.0
// Multiplies one tile, 64 rows a warpgroup.
#pragma once

#include "kernels/cuda/common/release.cuh"
#include "kernels/cuda/sm90/head_gemm/config.cuh"

namespace fovea::kernels::cuda {

// One group of products is still running when the next one starts.
template <int kRows, bool kIsKn, Type kType>
__device__ __forceinline__ void multiply(const HopperHeadGemmParams& params,
                                         typename Tiles<kRows, kIsKn>::SharedMemory& shared,
                                         int consumer, Ring<Tiles<kRows, kIsKn>::kStages>& ring,
                                         float (&sums)[Tiles<kRows, kIsKn>::kColumns / 2]) {
  using Shape = Tiles<kRows, kIsKn>;
  const int column = Shape::first_column(consumer);
  int before = -1;
  for (int k = 0; k < params.k; k += kDepth) {
    auto& stage = shared.stages[ring.stage];
    shared.full[ring.stage].wait(ring.phase);
    const uint64_t rows = rows_descriptor(shared_address(stage.rows[Shape::first_row(consumer)]));
    const uint32_t weights = shared_address(stage.weights[column / kBoxColumns]);
    products_begin();
#pragma unroll
    for (int step = 0; step < kDepth / 16; ++step) {
      const uint64_t columns =
          kIsKn ? moved(columns_descriptor(weights, sizeof(stage.weights[0])), step * 16 * 128)
                : moved(rows_descriptor(weights), step * 32);
      Product<Shape::kColumns>::template run<kType, kIsKn>(sums, moved(rows, step * 32), columns,
                                                           k > 0 || step > 0);
    }
    products_commit();
    products_wait<1>();
    if (before >= 0) release(shared.empty[before]);
    before = ring.stage;
    ring.advance();
  }
  products_wait<0>();
  products_landed(sums);
  release(shared.empty[before]);
}

}  // namespace fovea::kernels::cuda
