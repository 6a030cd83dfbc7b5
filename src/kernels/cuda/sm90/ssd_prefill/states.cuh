// SPDX-License-Identifier: Apache-2.0
// The warpgroup that takes 64 rows of a state through the chunks of a request: S' = decay S +
// (keep V)^T K, in registers.
#pragma once

#include "kernels/cuda/sm90/ssd_prefill/config.cuh"

namespace fovea::kernels::cuda {

template <Type kType>
class SsdStates {
 public:
  __device__ __forceinline__ SsdStates(const SsdPrefillParams& params, SsdMemory& shared)
      : params_(params), shared_(shared) {}

  __device__ __forceinline__ void run(const Walk& walk) {
    float state[64] = {};
    if (!walk.from_zero) load_state(state, params_.state, params_.state_type, walk.state(params_));
    uint32_t rounded[32];
    round<kType>(rounded, state);
#pragma unroll 1
    for (int n = 0; n < walk.chunks; ++n, ring_.advance(), turn_ ^= 1) {
      SsdStage& stage = shared_.stages[ring_.stage];
      shared_.full[ring_.stage].wait(ring_.phase);
      const int tokens = walk.tokens - n * kChunkTokens;
      if (tokens < kChunkTokens) clear_rows_from(stage.k, stage.v, tokens);
      shared_.state.empty.wait(turn_ ^ 1);
      store_rounded(shared_.state.rows, rounded);
      shared_.state.hand_over();
      uint32_t kept[16];
      load_kept(kept, stage);
      const float decay = stage.factors.decay;
#pragma unroll
      for (int i = 0; i < 64; ++i) state[i] *= decay;
      products_begin();
      add_keys<kType>(state, kept, stage.k);
      products_commit();
      products_wait<0>();
      products_landed(state);
      round<kType>(rounded, state);
      release(shared_.empty[ring_.stage]);
    }
    store_state(state, params_.state, params_.state_type, walk.state(params_));
  }

 private:
  // Loads values times their factors, as the left operand of a product over tokens.
  __device__ __forceinline__ static void load_kept(uint32_t (&kept)[16], const SsdStage& stage) {
    const Place place;
    load_values(kept, stage.v);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const auto keep =
          *reinterpret_cast<const float2*>(&stage.factors.keep[i / 2 * 8 + place.column]);
      const float2 v = unpack<kType>(kept[i]);
      kept[i] = pack<kType>(v.x * keep.x, v.y * keep.y);
    }
  }

  const SsdPrefillParams& params_;
  SsdMemory& shared_;
  Ring<kStages> ring_;
  uint32_t turn_ = 0;  // phase of what is handed over
};

}  // namespace fovea::kernels::cuda
