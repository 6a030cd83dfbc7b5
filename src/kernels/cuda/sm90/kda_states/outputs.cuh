// SPDX-License-Identifier: Apache-2.0
// The warpgroup of outputs, with tokens in rows: O = read S^T + scores U^T, by the state before the
// chunk and the new values, which the other warpgroup hands over.
#pragma once

#include "kernels/cuda/sm90/kda_states/config.cuh"

namespace fovea::kernels::cuda {

template <Type kType>
class OutputWalk {
 public:
  __device__ __forceinline__ OutputWalk(const KdaPrefillParams& params, WalkMemory& shared)
      : params_(params), shared_(shared) {}

  __device__ __forceinline__ void run(const Walk& walk) {
#pragma unroll 1
    for (int n = 0; n < walk.chunks; ++n, ring_.advance(), turn_ ^= 1) {
      const KdaQueryTerms& stage = shared_.queries[ring_.stage];
      shared_.queries_full[ring_.stage].wait(ring_.phase);
      float out[32];
      shared_.state.full.wait(turn_);
      products_begin();
      multiply_rows<kType>(out, stage.read, shared_.state.rows);
      products_commit();
      products_wait<0>();
      products_landed(out);
      release(shared_.state.empty);
      shared_.values.full.wait(turn_);
      products_begin();
#pragma unroll
      for (int step = 0; step < kChunkTokens / 16; ++step) {
        multiply_rows<kType>(out, stage.scores, shared_.values.rows, step, true);
      }
      products_commit();
      products_wait<0>();
      products_landed(out);
      release(shared_.values.empty);
      release(shared_.queries_empty[ring_.stage]);
      store(out, walk, n * kChunkTokens);
    }
  }

 private:
  // Stores the outputs of a chunk whose first token is `first` of the request: whole sectors of 32
  // bytes, because the rings leave no room for lines.
  __device__ __forceinline__ void store(const float (&out)[32], const Walk& walk, int first) const {
    const Place place;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = first + place.row + 8 * half;
      if (token >= walk.tokens) continue;
      float* const row = walk.out(params_, token) + place.column;
#pragma unroll
      for (int j = 0; j < kBlockValues / 8; ++j) {
        *reinterpret_cast<float2*>(row + 8 * j) = {out[4 * j + 2 * half],
                                                   out[4 * j + 2 * half + 1]};
      }
    }
  }

  const KdaPrefillParams& params_;
  WalkMemory& shared_;
  Ring<kQueryStages> ring_;
  uint32_t turn_ = 0;  // phase of what the other warpgroup hands over
};

}  // namespace fovea::kernels::cuda
