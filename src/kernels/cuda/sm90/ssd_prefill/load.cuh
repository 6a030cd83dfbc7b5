// SPDX-License-Identifier: Apache-2.0
// The producers: a thread that loads chunks through the copy engine, and a warp that finds the
// factors of their tokens.
#pragma once

#include "kernels/cuda/sm90/ssd_prefill/config.cuh"

namespace fovea::kernels::cuda {

// One thread. `ring` continues that of the block's last walk.
__device__ __forceinline__ void load_chunks(const SsdPrefillParams& params, SsdMemory& shared,
                                            const Walk& walk, Ring<kStages>& ring) {
#pragma unroll 1
  for (int n = 0; n < walk.chunks; ++n, ring.advance()) {
    SsdStage& stage = shared.stages[ring.stage];
    TransactionBarrier& full = shared.full[ring.stage];
    shared.empty[ring.stage].wait(ring.phase ^ 1);
    full.arrive_expecting(sizeof(stage.k) + sizeof(stage.q) + sizeof(stage.v));
    const int token = walk.begin + n * kChunkTokens;
    const int key = walk.key_head * kKeyDim;
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      load_box(stage.k[box], params.k, full, key + box * kBoxWidth, token);
    }
    load_box(stage.v, params.v, full, walk.value, token);
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      load_box(stage.q[box], params.q, full, key + box * kBoxWidth, token);
    }
  }
}

// The gates of two neighbouring tokens. Tokens beyond the request do not decay and have strength 0.
struct TwoGates {
  float log_decay[2], strength[2];

  __device__ __forceinline__ void load(const SsdPrefillParams& params, const Walk& walk,
                                       int first) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      log_decay[i] = strength[i] = 0;
      if (first + i >= walk.tokens) continue;
      const int64_t token = walk.begin + first + i;
      log_decay[i] = params.log_decay[token * params.log_decay_stride + walk.head];
      strength[i] = params.strength ? params.strength[token * params.value_heads + walk.head] : 1;
    }
  }
};

// One warp; lanes have two tokens each.
__device__ __forceinline__ void find_factors(const SsdPrefillParams& params, SsdMemory& shared,
                                             const Walk& walk, Ring<kStages>& ring) {
  constexpr float kLog2E = 1.4426950408889634f;
  constexpr float kMinLogDecay = -90;  // acts as 0 in f32; a bound keeps sums finite
  const int token = static_cast<int>(threadIdx.x) % 32 * 2;
  TwoGates next;
  next.load(params, walk, token);
#pragma unroll 1
  for (int n = 0; n < walk.chunks; ++n, ring.advance()) {
    const TwoGates gates = next;
    next.load(params, walk, (n + 1) * kChunkTokens + token);
    const float decay[2] = {fmaxf(gates.log_decay[0], kMinLogDecay) * kLog2E,
                            fmaxf(gates.log_decay[1], kMinLogDecay) * kLog2E};
    const float sum = warp_scan(decay[0] + decay[1]);
    const float last = __shfl_sync(~0u, sum, 31);
    const float sums[2] = {sum - decay[1], sum};
    shared.empty[ring.stage].wait(ring.phase ^ 1);
    SsdFactors& factors = shared.stages[ring.stage].factors;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      factors.decays[token + i] = sums[i];
      factors.strengths[token + i] = gates.strength[i];
      factors.read[token + i] = exp2_fast(sums[i]) * params.scale;
      factors.keep[token + i] = exp2_fast(last - sums[i]) * gates.strength[i];
    }
    if (token == 0) factors.decay = exp2_fast(last);
    release(shared.full[ring.stage]);
  }
}

}  // namespace fovea::kernels::cuda
