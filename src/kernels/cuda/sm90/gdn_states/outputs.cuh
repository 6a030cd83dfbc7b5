// SPDX-License-Identifier: Apache-2.0
// The warpgroup of outputs, with tokens in rows: O = read Q S^T + scores U^T, by the state before
// the chunk and the new values, which the other warpgroup hands over.
#pragma once

#include "kernels/cuda/sm90/gdn_states/config.cuh"

namespace fovea::kernels::cuda {

template <Type kType>
class OutputWalk {
 public:
  __device__ __forceinline__ OutputWalk(const GdnPrefillParams& params, WalkMemory& shared)
      : params_(params), shared_(shared) {}

  __device__ __forceinline__ void run(const Walk& walk) {
#pragma unroll 1
    for (int n = 0; n < walk.chunks; ++n, ring_.advance(), turn_ ^= 1) {
      Stage& stage = shared_.stages[ring_.stage];
      shared_.full[ring_.stage].wait(ring_.phase);
      const Place place;
      const float read[2] = {stage.terms.read[place.row], stage.terms.read[place.row + 8]};
      float out[32];
      shared_.state.full.wait(turn_);
      products_begin();
      multiply_rows<kType>(out, stage.q, shared_.state.rows);
      products_commit();
      products_wait<0>();
      products_landed(out);
      release(shared_.state.empty);
#pragma unroll
      for (int i = 0; i < 32; ++i) out[i] *= read[i % 4 / 2];
      shared_.values.full.wait(turn_);
      products_begin();
#pragma unroll
      for (int step = 0; step < kChunkTokens / 16; ++step) {
        multiply_rows<kType>(out, stage.terms.scores, shared_.values.rows, step, true);
      }
      products_commit();
      products_wait<0>();
      products_landed(out);
      release(shared_.values.empty);
      release(shared_.empty[ring_.stage]);
      const int first = n * kChunkTokens;
      store_outputs(out, shared_.out, walk.out(params_, first), params_.out_token_stride,
                    walk.tokens - first);
    }
  }

 private:
  const GdnPrefillParams& params_;
  WalkMemory& shared_;
  Ring<kStages> ring_;
  uint32_t turn_ = 0;  // phase of what the other warpgroup hands over
};

}  // namespace fovea::kernels::cuda
