// SPDX-License-Identifier: Apache-2.0
// The producers: a warp for each warpgroup loads chunks through the copy engine.
#pragma once

#include "kernels/cuda/sm90/kda_states/config.cuh"

namespace fovea::kernels::cuda {

// Returns how many chunks from the n-th one on have terms now, at least one.
__device__ __forceinline__ int wait_for_terms(const KdaPrefillParams& params, const Walk& walk,
                                              int n) {
  return terms_of(params, walk, n, params.value_heads, kKdaReaders).wait(walk.chunks - n);
}

// One warp each. `ring` continues that of the block's last walk.
__device__ __forceinline__ void load_keys(const KdaPrefillParams& params, WalkMemory& shared,
                                          const Walk& walk, Ring<kKeyStages>& ring) {
  int there = 0;  // chunks whose terms have arrived
#pragma unroll 1
  for (int n = 0; n < walk.chunks; ++n, ring.advance()) {
    if (n == there) there += wait_for_terms(params, walk, n);
    if (threadIdx.x % 32 != 0) continue;
    KeyStage& stage = shared.keys[ring.stage];
    TransactionBarrier& full = shared.keys_full[ring.stage];
    shared.keys_empty[ring.stage].wait(ring.phase ^ 1);
    full.arrive_expecting(kKeyBytes + sizeof(Tile));
    load_bytes(&stage.terms, &params.terms[walk.term(params, n)].keys, kKeyBytes, full);
    load_box(stage.v, params.v, full, walk.value, walk.begin + n * kChunkTokens);
  }
  rejoin_lanes();
}
__device__ __forceinline__ void load_queries(const KdaPrefillParams& params, WalkMemory& shared,
                                             const Walk& walk, Ring<kQueryStages>& ring) {
  int there = 0;
#pragma unroll 1
  for (int n = 0; n < walk.chunks; ++n, ring.advance()) {
    if (n == there) there += wait_for_terms(params, walk, n);
    if (threadIdx.x % 32 != 0) continue;
    TransactionBarrier& full = shared.queries_full[ring.stage];
    shared.queries_empty[ring.stage].wait(ring.phase ^ 1);
    full.arrive_expecting(sizeof(KdaQueryTerms));
    load_bytes(&shared.queries[ring.stage].terms, &params.terms[walk.term(params, n)].queries,
               sizeof(KdaQueryTerms), full);
  }
  rejoin_lanes();
}

}  // namespace fovea::kernels::cuda
