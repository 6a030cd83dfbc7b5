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
#pragma unroll
      for (int step = 0; step < kGdnDim / 16; ++step) {
        multiply(out, stage.q[step / 4], shared_.state.rows[step / 4], step % 4, step > 0);
      }
      products_commit();
      products_wait<0>();
      products_landed(out);
      release(shared_.state.empty);
#pragma unroll
      for (int i = 0; i < 32; ++i) out[i] *= read[i % 4 / 2];
      shared_.values.full.wait(turn_);
      products_begin();
#pragma unroll
      for (int step = 0; step < kGdnChunk / 16; ++step) {
        multiply(out, stage.terms.scores, shared_.values.rows, step, true);
      }
      products_commit();
      products_wait<0>();
      products_landed(out);
      release(shared_.values.empty);
      release(shared_.empty[ring_.stage]);
      store(out, walk, n * kGdnChunk);
    }
  }

 private:
  // to = a b^T for 16 of the summed columns, or added to it.
  __device__ __forceinline__ static void multiply(float (&to)[32], const Tile& a, const Tile& b,
                                                  int step, bool add) {
    Product<kBlockValues>::template run<kType, false>(
        to, moved(rows_descriptor(shared_address(a)), step * 32),
        moved(rows_descriptor(shared_address(b)), step * 32), add);
  }

  // Stores the outputs of a chunk whose first token is `first` of the request: each warp its 16
  // tokens, through shared memory, so that a store fills whole lines.
  __device__ __forceinline__ void store(const float (&out)[32], const Walk& walk, int first) const {
    float* const to = params_.out + (walk.begin + first) * params_.out_token_stride +
                      walk.head * kGdnDim + walk.first_value;
    store_outputs(out, shared_.out, to, params_.out_token_stride, walk.tokens - first);
  }

  const GdnPrefillParams& params_;
  WalkMemory& shared_;
  Ring<kStages> ring_;
  uint32_t turn_ = 0;  // phase of what the other warpgroup hands over
};

}  // namespace fovea::kernels::cuda
