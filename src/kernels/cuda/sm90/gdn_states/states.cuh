// SPDX-License-Identifier: Apache-2.0
// The warpgroup that takes 64 rows of a state through the chunks of a walk. All its products
// have values in their rows, so that the state and new values stay in registers: the sums of one
// product are the left operand of the next. Products of a chunk, and what is done meanwhile:
//
//   S K^T          the state is stored for outputs
//   Y solve^T      it is handed over, and decays here; before it Y = V - recall S K^T
//   S += U keep K  the new values U are handed over
//
// In blocks that find the effect of a segment two such warpgroups take rows of both parts of it.
#pragma once

#include "kernels/cuda/sm90/gdn_states/config.cuh"

namespace fovea::kernels::cuda {

template <Type kType, bool kCut>
class StateWalk {
 public:
  __device__ __forceinline__ StateWalk(const GdnPrefillParams& params, WalkMemory& shared)
      : params_(params), shared_(shared) {}

  // Takes the state through a walk with outputs.
  __device__ __forceinline__ void run(const Walk& walk) {
    float state[64] = {};
    begin_walk<kCut>(state, params_, walk, shared_.effects(ring_));
    uint32_t rounded[32];
    round<kType>(rounded, state);
#pragma unroll 1
    for (int n = 0; n < walk.chunks; ++n, ring_.advance(), turn_ ^= 1) {
      Stage& stage = shared_.stages[ring_.stage];
      shared_.full[ring_.stage].wait(ring_.phase);
      const int tokens = walk.tokens - n * kChunkTokens;
      if (tokens < kChunkTokens) clear_rows_from(stage.k, stage.v, tokens);
      uint32_t values[16];
      load_values(values, stage.v);
      take_through<true>(stage, values, state, rounded);
      release(shared_.empty[ring_.stage]);
    }
    end_walk<kCut>(state, params_, walk);
  }

  // Finds rows of a segment's matrix or of its sums.
  __device__ __forceinline__ void find_effect(const Walk& walk, bool is_matrix) {
    float state[64] = {};
    if (is_matrix) set_identity(state, walk.part());
    uint32_t rounded[32];
    round<kType>(rounded, state);
#pragma unroll 1
    for (int n = 0; n < walk.chunks; ++n, ring_.advance()) {
      Stage& stage = shared_.stages[ring_.stage];
      shared_.full[ring_.stage].wait(ring_.phase);
      uint32_t values[16] = {};
      if (!is_matrix) load_values(values, stage.v);
      take_through<false>(stage, values, state, rounded);
      release(shared_.empty[ring_.stage]);
    }
    if (is_matrix) {
      store_matrix(state, shared_.state.rows, *reinterpret_cast<Tile(*)[kBoxes]>(&shared_.out.rows),
                   params_, walk);
    } else {
      store_sums(state, params_, walk);
    }
    publish_effect(params_, walk);
  }

 private:
  // Takes the state through a chunk. `rounded` is the state as a left operand.
  template <bool kOutputs>
  __device__ __forceinline__ void take_through(Stage& stage, const uint32_t (&values)[16],
                                               float (&state)[64], uint32_t (&rounded)[32]) {
    float4 factors[8];  // recall and keep of two tokens each
    load_factors(factors, stage.terms);
    const float decay = stage.terms.decay;

    float sums[32];
    products_begin();
    multiply_state<kType>(sums, rounded, stage.k);
    products_commit();
    if constexpr (kOutputs) {
      shared_.state.empty.wait(turn_ ^ 1);
      store_rounded(shared_.state.rows, rounded);
    }
    products_wait<0>();
    products_landed(sums);
    uint32_t left[16];
    subtract(left, values, sums, factors);
    products_begin();
    multiply_tokens<kType>(sums, left, stage.terms.solve);
    products_commit();
    if constexpr (kOutputs) shared_.state.hand_over();
#pragma unroll
    for (int i = 0; i < 64; ++i) state[i] *= decay;
    products_landed(state);  // here, not after the wait
    products_wait<0>();
    products_landed(sums);
    if constexpr (kOutputs) round<kType>(left, sums);
#pragma unroll
    for (int i = 0; i < 32; ++i) sums[i] *= i % 2 ? factors[i / 4].w : factors[i / 4].z;
    uint32_t kept[16];
    round<kType>(kept, sums);
    products_begin();
    add_keys<kType>(state, kept, stage.k);
    products_commit();
    if constexpr (kOutputs) {
      shared_.values.empty.wait(turn_ ^ 1);
      store_rounded(&shared_.values.rows, left);
      shared_.values.hand_over();
    }
    products_wait<0>();
    products_landed(state);
    round<kType>(rounded, state);
  }

  // Loads the factors of the tokens in this thread's columns.
  __device__ __forceinline__ static void load_factors(float4 (&factors)[8], const GdnTerms& terms) {
    const Place place;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      factors[j] = *reinterpret_cast<const float4*>(terms.recall_keep[(8 * j + place.column) / 2]);
    }
  }

  // left = values - recall sums
  __device__ __forceinline__ static void subtract(uint32_t (&left)[16],
                                                  const uint32_t (&values)[16],
                                                  const float (&sums)[32],
                                                  const float4 (&factors)[8]) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float2 v = unpack<kType>(values[i]);
      const float4 factor = factors[i / 2];
      left[i] =
          pack<kType>(fmaf(-factor.x, sums[2 * i], v.x), fmaf(-factor.y, sums[2 * i + 1], v.y));
    }
  }

  const GdnPrefillParams& params_;
  WalkMemory& shared_;
  Ring<kStages> ring_;
  uint32_t turn_ = 0;  // phase of what is handed over
};

}  // namespace fovea::kernels::cuda
