// SPDX-License-Identifier: Apache-2.0
// The warpgroup of outputs, with tokens in rows: O = read Q S^T + scores U^T, by the state before
// the chunk and the new values, which the other warpgroup hands over.
#pragma once

#include "kernels/cuda/sm90/gdn_states/config.cuh"

namespace fovea::kernels::cuda {

template <Type kType, bool kCut>
class OutputWalk {
 public:
  __device__ __forceinline__ explicit OutputWalk(WalkMemory& shared) : shared_(shared) {}

  __device__ __forceinline__ void run(const Walk& walk) {
    if (kCut) skip_effects(walk, shared_.effects(ring_));
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
      shared_.out.empty.wait(turn_ ^ 1);
      keep_outputs(out, shared_.out.rows);
      release(shared_.out.full);
    }
  }

 private:
  WalkMemory& shared_;
  Ring<kStages> ring_;
  uint32_t turn_ = 0;  // phase of what is handed over
};

// The warps that store outputs, because stores wait long for each other. `part` numbers them.
class StoreWalk {
 public:
  __device__ __forceinline__ StoreWalk(const GdnPrefillParams& params, WalkMemory& shared, int part)
      : params_(params), shared_(shared), part_(part) {}

  __device__ __forceinline__ void run(const Walk& walk) {
    constexpr int kRows = kChunkTokens / kStoringWarps;
#pragma unroll 1
    for (int n = 0; n < walk.chunks; ++n, turn_ ^= 1) {
      const int first = n * kChunkTokens;
      shared_.out.full.wait(turn_);
      store_kept<kRows>(shared_.out.rows, part_ * kRows, walk.out(params_, first),
                        params_.out_token_stride, walk.tokens - first);
      release(shared_.out.empty);
    }
  }

 private:
  const GdnPrefillParams& params_;
  WalkMemory& shared_;
  int part_;
  uint32_t turn_ = 0;
};

}  // namespace fovea::kernels::cuda
