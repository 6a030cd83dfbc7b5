// SPDX-License-Identifier: Apache-2.0
// The producer: loads chunks through the copy engine.
#pragma once

#include "kernels/cuda/sm90/gdn_states/config.cuh"

namespace fovea::kernels::cuda {

// One warp. `ring` continues that of the block's last walk. A walk without outputs needs no queries
// and no scores.
template <bool kOutputs>
__device__ __forceinline__ void load_chunks(const GdnPrefillParams& params, WalkMemory& shared,
                                            const Walk& walk, Ring<kStages>& ring) {
  constexpr int kTermBytes = kOutputs ? sizeof(GdnTerms) : sizeof(GdnStateTerms);
  int there = 0;  // chunks whose terms have arrived
#pragma unroll 1
  for (int n = 0; n < walk.chunks; ++n, ring.advance()) {
    if (n == there) there += terms_of(params, walk, n, params.key_heads, 1).wait(walk.chunks - n);
    if (threadIdx.x % 32 != 0) continue;
    Stage& stage = shared.stages[ring.stage];
    TransactionBarrier& full = shared.full[ring.stage];
    shared.empty[ring.stage].wait(ring.phase ^ 1);
    full.arrive_expecting((kOutputs ? 2 : 1) * sizeof(stage.k) + sizeof(stage.v) + kTermBytes);
    const int token = walk.begin + n * kChunkTokens;
    const int key = walk.key_head * kKeyDim;
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      load_box(stage.k[box], params.k, full, key + box * kBoxWidth, token);
    }
    load_box(stage.v, params.v, full, walk.value, token);
    load_bytes(&stage.terms, params.terms + walk.term(params, n), kTermBytes, full);
    if (!kOutputs) continue;
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      load_box(stage.q[box], params.q, full, key + box * kBoxWidth, token);
    }
  }
  rejoin_lanes();
}

}  // namespace fovea::kernels::cuda
