// SPDX-License-Identifier: Apache-2.0
// Loads keys, queries and gates of a chunk, and finds the norms of keys and queries.
#pragma once

#include "kernels/cuda/sm90/gdn_chunks/config.cuh"

namespace fovea::kernels::cuda {

constexpr float kLog2E = 1.4426950408889634f;
// Decays below e^-90 act as 0 in f32; a bound keeps their sums finite.
constexpr float kMinLogDecay = -90;
constexpr float kNormEpsilon = 1e-6f;

// Asks for a task's keys, queries and gates.
__device__ __forceinline__ void request(const GdnPrefillParams& params, ChunkMemory& shared,
                                        const Task& task) {
  const int thread = thread_of_worker();
  if (thread == 0) {
    shared.full.arrive_expecting(sizeof(shared.k) + sizeof(shared.q));
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      const int column = task.key_head * kKeyDim + box * kBoxWidth;
      load_box(shared.k[box], params.k, shared.full, column, task.chunk.begin);
      load_box(shared.q[box], params.q, shared.full, column, task.chunk.begin);
    }
  }
  const int share = params.value_heads / params.key_heads;
  for (int i = thread; i < share * kChunkTokens; i += kWarpgroupThreads) {
    const int token = i / share, head = i % share;
    if (token >= task.chunk.tokens) break;
    const int64_t at = static_cast<int64_t>(task.chunk.begin + token) * params.value_heads +
                       task.key_head * share + head;
    copy_word_async(&shared.log_decays[head][token], params.log_decay + at, 4);
    copy_word_async(&shared.gates[head][token], params.strength + at, 4);
  }
  commit_copies();
}

// Tokens beyond the chunk have no decay and beta 0. Warps take value heads in turn.
__device__ __forceinline__ void sum_gates(ChunkMemory& shared, int tokens, int share) {
  const PlaceAnew place;
  for (int head = place.warp; head < share; head += 4) {
    float decay[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = 2 * place.lane + i;
      const bool exists = token < tokens;
      decay[i] = exists ? fmaxf(shared.log_decays[head][token], kMinLogDecay) * kLog2E : 0;
      shared.betas[head][token] = exists ? shared.gates[head][token] : 0;
    }
    const float sum = warp_scan(decay[0] + decay[1]);
    shared.decays[head][2 * place.lane] = sum - decay[1];
    shared.decays[head][2 * place.lane + 1] = sum;
  }
}

// Keys and queries of tokens beyond the chunk belong to others; their rows become 0.
__device__ __forceinline__ void clear_rows_from(ChunkMemory& shared, Worker worker, int tokens) {
  constexpr int kRowChunks = kBoxWidth / 8;
  auto* const tiles = reinterpret_cast<uint4*>(shared.k);  // q follows
  for (int tile = 0; tile < 2 * kBoxes; ++tile) {
    for (int i = tokens * kRowChunks + thread_of_worker(); i < kChunkTokens * kRowChunks;
         i += kWarpgroupThreads) {
      tiles[tile * kChunkTokens * kRowChunks + i] = {};
    }
  }
  fence_async_proxy();
  worker.sync();
}

// Finds the factors of keys (the first 64 threads) and queries.
__device__ __forceinline__ void find_norms(const GdnPrefillParams& params, ChunkMemory& shared) {
  const int thread = thread_of_worker();
  const int row = thread % kChunkTokens;
  const bool is_key = thread < kChunkTokens;
  float factor = 1;
  if (params.l2_normalise) {
    float squares = kNormEpsilon;
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      Tile& tile = is_key ? shared.k[box] : shared.q[box];
#pragma unroll
      for (int i = 0; i < kBoxWidth / 8; ++i) {
        const uint4 values = *reinterpret_cast<const uint4*>(swizzled(tile, row, i));
        const uint32_t words[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float2 pair = unpack<bf16>(words[j]);
          squares = fmaf(pair.x, pair.x, fmaf(pair.y, pair.y, squares));
        }
      }
    }
    factor = rsqrtf(squares);
  }
  (is_key ? shared.k_scale : shared.q_scale)[row] = is_key ? factor : factor * params.scale;
}

// Joins decays and factors of keys, so that one power serves both.
__device__ __forceinline__ void set_exponents(ChunkMemory& shared, int share) {
  for (int i = thread_of_worker(); i < share * kChunkTokens; i += kWarpgroupThreads) {
    const int head = i / kChunkTokens, token = i % kChunkTokens;
    const float key = __log2f(shared.k_scale[token]), decay = shared.decays[head][token];
    shared.rows[head][token] = decay + key;
    shared.columns[head][token] = decay - key;
  }
}

}  // namespace fovea::kernels::cuda
