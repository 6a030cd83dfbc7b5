// SPDX-License-Identifier: Apache-2.0
// Everything about a chunk of a gated delta net that does not depend on the state (GdnTerms): its
// triangular solve, its scores, and the factors of its tokens. A task is a chunk and a key head
// with all its value heads, which share the products of keys and queries. A worker loads its next
// task's inputs as soon as it has multiplied those of the current one. Factors of norms and decays
// are applied to sums, so that keys and queries are multiplied as they are in memory.
#pragma once

#include "kernels/cuda/sm90/gdn_chunks/load.cuh"

namespace fovea::kernels::cuda {

template <Type kType>
struct GdnChunksConfig {
  static_assert(kType == bf16);
  using Params = GdnPrefillParams;
  using SharedMemory = BlockMemory;
  static constexpr int kBlocksPerSm = 1;
  static constexpr KernelTraits kTraits = {kWorkers * kWarpgroupThreads, sizeof(SharedMemory),
                                           kChunkTokens, kChunkTokens};
  static_assert(sizeof(SharedMemory) <= kMaxSharedBytes);

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
  __device__ static void apply_decays(ChunkMemory& shared, int head, const float (&keys)[32],
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

  __device__ static void set_factors(ChunkMemory& shared, int head) {
    const int token = thread_of_worker();
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
    auto& block = *reinterpret_cast<SharedMemory*>(dynamic_shared);
    const Worker worker;
    ChunkMemory& shared = block.workers[worker.number];
    if (thread_of_worker() == 0) {
      shared.stored = -1;
      shared.full.init(1);
      fence_barrier_init();
    }
    // Blocks above the diagonal stay 0.
    for (int i = thread_of_worker(); i < sizeof(GdnTerms) / sizeof(uint4); i += kWarpgroupThreads) {
      reinterpret_cast<uint4*>(&shared.terms)[i] = {};
    }
    wait_and_allow_next();
    if (threadIdx.x == 0) block.tasks = WorkerTasks(params, params.key_heads, pace(params));
    __syncthreads();
    int task = block.tasks.begin(worker);
    if (task < block.tasks.count) request(params, shared, Task(params, task));
    uint32_t phase = 0;
#pragma unroll 1
    for (; task < block.tasks.count; phase ^= 1) {
      const int next = block.tasks.after(task, worker);
      run_task(params, shared, worker, Task(params, task), phase, [&] {
        if (next < block.tasks.count) request(params, shared, Task(params, next));
      });
      task = next;
    }
    if (thread_of_worker() == 0) publish(params, shared);
  }

 private:
  // Returns how many tasks a block ends while a state goes through 64 chunks (chosen on H200,
  // 2026-11-30: a prompt of 16k tokens 4 % faster than with 350).
  __device__ __forceinline__ static int pace(const Params& params) {
    return 500 / (10 * params.value_heads / params.key_heads + 7);
  }

  // One thread of the worker.
  __device__ __forceinline__ static void publish(const Params& params, const ChunkMemory& shared) {
    if (shared.stored >= 0) cuda::publish(params.plan.progress + shared.stored);
  }

  // Calls request_next() when the task's inputs have been read.
  template <typename RequestNext>
  __device__ __forceinline__ static void run_task(const Params& params, ChunkMemory& shared,
                                                  Worker worker, const Task& task, uint32_t phase,
                                                  RequestNext request_next) {
    const int share = params.value_heads / params.key_heads;
    wait_copies<0>();
    worker.sync();
    sum_gates(shared, task.chunk.tokens, share);
    shared.full.wait(phase);
    if (task.chunk.tokens < kChunkTokens) clear_rows_from(shared, worker, task.chunk.tokens);

    float keys[32], queries[32];
    products_begin();
    multiply(keys, shared.k, shared.k);
    multiply(queries, shared.q, shared.k);
    products_commit();
    if (thread_of_worker() == 0) {  // by now the last task's terms are stored
      publish(params, shared);
      shared.stored = task.number;
    }
    find_norms(params, shared);
    products_wait<0>();
    products_landed(keys);
    products_landed(queries);
    worker.sync();
    request_next();
    set_exponents(shared, share);
    GdnTerms* to = params.terms + static_cast<int64_t>(task.number) * params.value_heads +
                   task.key_head * share;
#pragma unroll 1
    for (int head = 0; head < params.value_heads / params.key_heads; ++head, ++to) {
      if (thread_of_worker() == 0) wait_stores_read();
      worker.sync();  // exponents are set, and the last terms have been read
      float g[32];
      const Solver solver{shared.terms.solve, shared.solve_low, shared.triangles, worker};
      apply_decays(shared, head, keys, queries, g);
      set_factors(shared, head);
      solver.solve_triangle(g, shared.betas[head]);
      solver.solve_rest(g);
      if (thread_of_worker() == 0) {
        store_bytes(to, &shared.terms, sizeof(GdnTerms));
        commit_stores();
      }
    }
  }
};

template <Type kType>
using Config = GdnChunksConfig<kType>;

}  // namespace fovea::kernels::cuda
