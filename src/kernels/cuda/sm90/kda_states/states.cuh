// SPDX-License-Identifier: Apache-2.0
// The warpgroup that takes 64 rows of a state through the chunks of a walk. All its products
// have values in their rows, so that the state and new values stay in registers: the sums of one
// product are the left operand of the next, rounded, and again what rounding has lost, because
// errors of new values stay in the state. Products of a chunk, and what is done meanwhile:
//
//   S recalled^T      the state is stored for outputs
//   Y solve^T         it is handed over, and decays here; before it Y = V - S recalled^T
//   S += U kept       the new values U are handed over
//
// In blocks that find the effect of a segment two such warpgroups take rows of both parts of it.
#pragma once

#include "kernels/cuda/sm90/kda_states/config.cuh"

namespace fovea::kernels::cuda {

template <Type kType, bool kCut>
class StateWalk {
 public:
  __device__ __forceinline__ StateWalk(const KdaPrefillParams& params, WalkMemory& shared)
      : params_(params), shared_(shared) {}

  // Takes the state through a walk with outputs.
  __device__ __forceinline__ void run(const Walk& walk) {
    float state[64] = {};
    begin_walk<kCut>(state, params_, walk, shared_.effects(ring_));
    uint32_t rounded[32];
    round<kType>(rounded, state);
#pragma unroll 1
    for (int n = 0; n < walk.chunks; ++n, ring_.advance(), turn_ ^= 1) {
      KeyStage& stage = shared_.keys[ring_.stage];
      shared_.keys_full[ring_.stage].wait(ring_.phase);
      const int tokens = walk.tokens - n * kChunkTokens;
      if (tokens < kChunkTokens) {  // the rows beyond are values of others
        clear_rows_from(stage.v, tokens);
        finish_clearing();
      }
      uint32_t values[16];
      load_values(values, stage.v);
      take_through<true>(stage, values, state, rounded);
      release(shared_.keys_empty[ring_.stage]);
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
      KeyStage& stage = shared_.keys[ring_.stage];
      shared_.keys_full[ring_.stage].wait(ring_.phase);
      uint32_t values[16] = {};
      if (!is_matrix) load_values(values, stage.v);
      take_through<false>(stage, values, state, rounded);
      release(shared_.keys_empty[ring_.stage]);
    }
    if (is_matrix) {
      store_matrix(state, shared_.state.rows, shared_.queries[0].terms.read, params_, walk);
    } else {
      store_sums(state, params_, walk);
    }
    publish_effect(params_, walk);
  }

 private:
  // Takes the state through a chunk, whose values become new ones. `rounded` is the state as a left
  // operand.
  template <bool kOutputs>
  __device__ __forceinline__ void take_through(KeyStage& stage, uint32_t (&values)[16],
                                               float (&state)[64], uint32_t (&rounded)[32]) {
    float sums[32];
    products_begin();
    multiply_state<kType>(sums, rounded, stage.terms.recalled);
    products_commit();
    if constexpr (kOutputs) {
      shared_.state.empty.wait(turn_ ^ 1);
      store_rounded(shared_.state.rows, rounded);
    }
    products_wait<0>();
    products_landed(sums);
    subtract(sums, values);
    uint32_t rest[16];
    split(values, rest, sums);
    products_begin();
    multiply_tokens<kType>(sums, rest, stage.terms.solve);
    multiply_tokens<kType>(sums, values, stage.terms.solve, true);
    products_commit();
    if constexpr (kOutputs) shared_.state.hand_over();
    decay(state, stage.terms.decays);
    products_landed(state);  // here, not after the wait
    products_wait<0>();
    products_landed(sums);
    split(values, rest, sums);
    products_begin();
    add_keys<kType>(state, rest, stage.terms.kept);
    add_keys<kType>(state, values, stage.terms.kept);
    products_commit();
    if constexpr (kOutputs) {
      shared_.values.empty.wait(turn_ ^ 1);
      store_rounded(&shared_.values.rows, values);
      shared_.values.hand_over();
    }
    products_wait<0>();
    products_landed(state);
    round<kType>(rounded, state);
  }

  // Rounds sums, and what rounding loses of them.
  __device__ __forceinline__ static void split(uint32_t (&rounded)[16], uint32_t (&rest)[16],
                                               const float (&sums)[32]) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      rounded[i] = pack<kType>(sums[2 * i], sums[2 * i + 1]);
      const float2 near = unpack<kType>(rounded[i]);
      rest[i] = pack<kType>(sums[2 * i] - near.x, sums[2 * i + 1] - near.y);
    }
  }

  // sums = values - sums
  __device__ __forceinline__ static void subtract(float (&sums)[32], const uint32_t (&values)[16]) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float2 v = unpack<kType>(values[i]);
      sums[2 * i] = v.x - sums[2 * i];
      sums[2 * i + 1] = v.y - sums[2 * i + 1];
    }
  }

  __device__ __forceinline__ static void decay(float (&state)[64], const float (&decays)[kKeyDim]) {
    const Place place;
#pragma unroll
    for (int j = 0; j < kKeyDim / 8; ++j) {
      const float2 pair = *reinterpret_cast<const float2*>(&decays[8 * j + place.column]);
#pragma unroll
      for (int i = 0; i < 4; ++i) state[4 * j + i] *= i % 2 ? pair.y : pair.x;
    }
  }

  const KdaPrefillParams& params_;
  WalkMemory& shared_;
  Ring<kKeyStages> ring_;
  uint32_t turn_ = 0;  // phase of what is handed over
};

}  // namespace fovea::kernels::cuda
