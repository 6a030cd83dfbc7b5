// SPDX-License-Identifier: Apache-2.0
// Everything about a chunk of a gated delta net that does not depend on the state (GdnTerms): its
// triangular solve, its scores, and the factors of its tokens. A task is a chunk and a key head
// with all its value heads, which share the products of keys and queries; a block takes every
// gridDim.x-th one, and loads the next one's inputs as soon as it has multiplied its own. Factors
// of norms and decays are applied to sums, so that keys and queries are multiplied as they are in
// memory.
#pragma once

#include "kernels/cuda/sm90/gdn_chunks/load.cuh"

namespace fovea::kernels::cuda {

template <Type kType>
struct GdnChunksConfig {
  static_assert(kType == bf16);
  using Params = GdnPrefillParams;
  using SharedMemory = ChunkMemory;
  static constexpr int kBlocksPerSm = 3;
  static constexpr KernelTraits kTraits = {kWarpgroupThreads, sizeof(SharedMemory), kChunkTokens,
                                           kChunkTokens};
  static_assert((sizeof(SharedMemory) + 1024) * kBlocksPerSm <= kMaxSharedBytes + 1024);

  // Multiplies the rows of `a` with those of k.
  __device__ __forceinline__ static void multiply(float (&sums)[32], Tile (&a)[kBoxes],
                                                  Tile (&k)[kBoxes]) {
#pragma unroll
    for (int step = 0; step < kKeyDim / 16; ++step) {
      const int offset = step % 4 * 32;
      Product<kChunkTokens>::template run<kType, false>(
          sums, moved(rows_descriptor(shared_address(a[step / 4])), offset),
          moved(rows_descriptor(shared_address(k[step / 4])), offset), step > 0);
    }
  }

  // Stores the scores of a value head, and sets g = decay_ij k_i k_j below the diagonal. Blocks of
  // 16 columns above the diagonal are left as they are.
  __device__ static void apply_decays(SharedMemory& shared, int head, const float (&keys)[32],
                                      const float (&queries)[32], float (&g)[32]) {
    const PlaceAnew place;
    const float rows[2] = {shared.rows[head][place.row], shared.rows[head][place.row + 8]};
    const float read[2] = {shared.q_scale[place.row] / shared.k_scale[place.row],
                           shared.q_scale[place.row + 8] / shared.k_scale[place.row + 8]};
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      if (j / 2 > place.warp) continue;
      uint32_t scores[4];
#pragma unroll
      for (int i = 0; i < 8; i += 2) {
        const int first = (4 * j + i) / 4 * 8 + place.column;
        const float2 columns = *reinterpret_cast<const float2*>(&shared.columns[head][first]);
        float score[2];
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const int at = 4 * j + i + n, half = i % 4 / 2;
          const int row = place.row + half * 8, column = first + n;
          const float weight =
              exp2_fast(column <= row ? rows[half] - (n ? columns.y : columns.x) : -infinity());
          score[n] = column <= row ? queries[at] * weight * read[half] : 0;
          g[at] = column < row ? keys[at] * weight : 0;
        }
        scores[i / 2] = pack<kType>(score[0], score[1]);
      }
      store_matrices(
          swizzled(shared.terms.scores, place.warp * 16 + place.lane % 16, j + place.lane / 16),
          scores);
    }
  }

  __device__ static void set_factors(SharedMemory& shared, int head) {
    const int token = static_cast<int>(threadIdx.x);
    if (token >= kChunkTokens) return;
    const float last = shared.decays[head][kChunkTokens - 1];
    const float recall = exp2_fast(shared.rows[head][token]);
    float* const factors = &shared.terms.recall_keep[token / 2][token % 2];
    factors[0] = recall;
    factors[2] = exp2_fast(last - shared.columns[head][token]);
    shared.terms.read[token] = exp2_fast(shared.decays[head][token]) * shared.q_scale[token];
    if (token == 0) shared.terms.decay = exp2_fast(last);
  }

  __device__ static void run(const Params& params) {
    extern __shared__ __align__(1024) char dynamic_shared[];
    auto& shared = *reinterpret_cast<SharedMemory*>(dynamic_shared);
    if (threadIdx.x == 0) {
      shared.full.init(1);
      fence_barrier_init();
    }
    // Blocks above the diagonal stay 0.
    for (int i = static_cast<int>(threadIdx.x); i < sizeof(GdnTerms) / sizeof(uint4);
         i += kWarpgroupThreads) {
      reinterpret_cast<uint4*>(&shared.terms)[i] = {};
    }
    __syncthreads();
    wait_and_allow_next();
    if (threadIdx.x == 0) shared.chunks = params.plan.counts->chunks;
    __syncthreads();
    const auto exists = [&](int task) { return task < shared.chunks * params.key_heads; };
    int task = static_cast<int>(blockIdx.x);
    if (exists(task)) request(params, shared, Task(params, task, shared.chunks));
    uint32_t phase = 0;
#pragma unroll 1
    for (; exists(task); phase ^= 1) {
      const int next = task + static_cast<int>(gridDim.x);
      run_task(params, shared, Task(params, task, shared.chunks), phase, [&] {
        if (exists(next)) request(params, shared, Task(params, next, shared.chunks));
      });
      task = next;
    }
    if (threadIdx.x == 0) wait_stores_read();
  }

 private:
  // Calls request_next() when the task's inputs have been read.
  template <typename RequestNext>
  __device__ __forceinline__ static void run_task(const Params& params, SharedMemory& shared,
                                                  const Task& task, uint32_t phase,
                                                  RequestNext request_next) {
    const int share = params.value_heads / params.key_heads;
    wait_copies<0>();
    __syncthreads();
    sum_gates(shared, task.chunk.tokens, share);
    shared.full.wait(phase);
    if (task.chunk.tokens < kChunkTokens) clear_rows_from(shared, task.chunk.tokens);

    float keys[32], queries[32];
    products_begin();
    multiply(keys, shared.k, shared.k);
    multiply(queries, shared.q, shared.k);
    products_commit();
    find_norms(params, shared);
    products_wait<0>();
    products_landed(keys);
    products_landed(queries);
    __syncthreads();
    request_next();
    set_exponents(shared, share);
    GdnTerms* to = params.terms + static_cast<int64_t>(task.number) * params.value_heads +
                   task.key_head * share;
#pragma unroll 1
    for (int head = 0; head < params.value_heads / params.key_heads; ++head, ++to) {
      if (threadIdx.x == 0) wait_stores_read();
      __syncthreads();  // exponents are set, and the last terms have been read
      float g[32];
      const Solver solver{shared.terms.solve, shared.solve_low, shared.triangles};
      apply_decays(shared, head, keys, queries, g);
      set_factors(shared, head);
      solver.solve_triangle(g, shared.betas[head]);
      solver.solve_rest(g);
      if (threadIdx.x == 0) {
        store_bytes(to, &shared.terms, sizeof(GdnTerms));
        commit_stores();
      }
    }
  }
};

template <Type kType>
using Config = GdnChunksConfig<kType>;

}  // namespace fovea::kernels::cuda
