// SPDX-License-Identifier: Apache-2.0
// Everything about a chunk of KDA that does not depend on the state (KdaTerms): keys and queries
// times their decays, the triangular solve and the scores. A task is a chunk and a value head. A
// worker loads its next task's keys and queries as soon as it has multiplied those of the current
// one. Each of its four warps has 16 tokens.
#pragma once

#include "kernels/cuda/sm90/kda_chunks/products.cuh"

namespace fovea::kernels::cuda {

template <Type kType>
struct KdaChunksConfig {
  static_assert(kType == bf16);
  using Params = KdaPrefillParams;
  using SharedMemory = BlockMemory;
  static constexpr int kBlocksPerSm = 1;
  static constexpr KernelTraits kTraits = {kWorkers * kWarpgroupThreads, sizeof(SharedMemory),
                                           kChunkTokens, kChunkTokens};
  static_assert(sizeof(SharedMemory) <= kMaxSharedBytes);
  // Tasks that a block ends while a state goes through 64 chunks (chosen on H200, 2026-11-30: a
  // prompt of 16k tokens 3 % faster than with 15).
  static constexpr int kPace = 12;

  __device__ static void run(const Params& params) {
    extern __shared__ __align__(1024) char dynamic_shared[];
    auto& block = *reinterpret_cast<SharedMemory*>(dynamic_shared);
    const Worker worker;
    ChunkMemory& shared = block.workers[worker.number];
    // Blocks above the diagonal stay 0.
    for (int i = thread_of_worker(); i < 3 * sizeof(Tile) / sizeof(uint4); i += kWarpgroupThreads) {
      reinterpret_cast<uint4*>(&shared.solve)[i] = {};
    }
    if (thread_of_worker() == 0) shared.stored = -1;
    wait_and_allow_next();
    if (threadIdx.x == 0) block.tasks = WorkerTasks(params, params.value_heads, kPace);
    __syncthreads();
    int task = block.tasks.begin(worker);
    if (task < block.tasks.count) request(params, shared, Task(params, task));
#pragma unroll 1
    while (task < block.tasks.count) {
      const int next = block.tasks.after(task, worker);
      run_task(params, shared, worker, task, [&] {
        if (next < block.tasks.count) request(params, shared, Task(params, next));
      });
      task = next;
    }
    if (thread_of_worker() == 0) publish(params, shared);
  }

 private:
  // One thread of the worker.
  __device__ __forceinline__ static void publish(const Params& params, const ChunkMemory& shared) {
    if (shared.stored >= 0) cuda::publish(params.plan.progress + shared.stored);
  }

  // Asks for a task's keys and queries.
  __device__ __forceinline__ static void request(const Params& params, ChunkMemory& shared,
                                                 const Task& task) {
    const PlaceAnew place;
    const int key_head = task.head / (params.value_heads / params.key_heads);
    const auto begin = static_cast<int64_t>(task.chunk.begin);
    request_rows(shared.keys[place.warp],
                 params.k + begin * params.k_token_stride + key_head * kKeyDim,
                 params.k_token_stride, task.chunk.tokens);
    request_rows(shared.queries[place.warp],
                 params.q + begin * params.q_token_stride + key_head * kKeyDim,
                 params.q_token_stride, task.chunk.tokens);
    commit_copies();
  }

  // Calls request_next() when the task's keys and queries have been read.
  template <typename RequestNext>
  __device__ __forceinline__ static void run_task(const Params& params, ChunkMemory& shared,
                                                  Worker worker, int number,
                                                  RequestNext request_next) {
    const Task task(params, number);
    KdaTerms& to = params.terms[number];
    const int thread = thread_of_worker();
    const auto begin = static_cast<int64_t>(task.chunk.begin);
    const int count = task.chunk.tokens;
    const int stride = params.value_heads * kKeyDim;
    const float* const log_decay = params.log_decay + begin * stride + task.head * kKeyDim;
    if (thread == 0) wait_stores_read();
    worker.sync();  // the last task's memory may be written
    sum_decays(shared, log_decay, stride, count);
    if (thread < kChunkTokens) {
      shared.betas[thread] =
          thread < count ? params.strength[(begin + thread) * params.value_heads + task.head] : 0;
    }
    wait_copies<0>();  // lanes read what they have copied themselves
    const RowScales scales(shared, params.l2_normalise, params.scale);
    worker.sync();
    if (thread == 0) {  // by now the last task's terms are stored
      publish(params, shared);
      shared.stored = task.number;
    }
    to.keys.decays[thread] = find_decays(shared);
    worker.sync();
    OwnProducts products;
    LaneDecays next;
    next.load(log_decay, stride, count);
#pragma unroll 1
    for (int group = 0; group < kGroups; ++group) {
      LaneDecays decays = next;
      if (group + 1 < kGroups) next.load(log_decay + (group + 1) * 32, stride, count);
      decays.sum();
      store(to, group, multiply_group(shared, products, group, decays, scales));
    }
    worker.sync();
    const Solver solver{shared.solve, shared.solve_low, shared.triangles, worker};
    float g[32] = {};  // without values the compiler keeps some in memory
    finish_own(shared, products, g);
    solver.solve_triangle(g, shared.betas);
    multiply_others(shared, g);
    request_next();
    solver.solve_rest(g);
    if (thread == 0) {
      store_bytes(to.keys.solve, shared.solve, sizeof(Tile));
      store_bytes(to.queries.scores, shared.scores, sizeof(Tile));
      commit_stores();
    }
  }

  __device__ __forceinline__ static void store(KdaTerms& to, int group, const TermRows& rows) {
    const PlaceAnew place;
    const int box = group / 2, chunk = group % 2 * 4 + place.lane % 4;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int row = place.row + 8 * n;
      *reinterpret_cast<uint4*>(swizzled(to.keys.recalled[box], row, chunk)) = rows.recalled[n];
      *reinterpret_cast<uint4*>(swizzled(to.keys.kept[box], row, chunk)) = rows.kept[n];
      *reinterpret_cast<uint4*>(swizzled(to.queries.read[box], row, chunk)) = rows.read[n];
    }
  }

  // Stores the scores of a warp's tokens and those of warp `block`. Sets g to the products of keys.
  __device__ __forceinline__ static void finish(ChunkMemory& shared, int block,
                                                const BlockProducts& products, float (&g)[32]) {
    const PlaceAnew place;
    float scores[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int row = place.row + i % 4 / 2 * 8;
      const float column = shared.key_factors[block * 16 + i / 4 * 8 + place.column + i % 2];
      g[8 * block + i] = products.keys[i / 4][i % 4] * (shared.key_factors[row] * column);
      scores[i] = products.queries[i / 4][i % 4] * (shared.query_factors[row] * column);
    }
    uint32_t rounded[4];
    round<kType>(rounded, scores);
    store_matrices(
        swizzled(shared.scores, place.warp * 16 + place.lane % 16, 2 * block + place.lane / 16),
        rounded);
  }

  __device__ __forceinline__ static void finish_own(ChunkMemory& shared,
                                                    const OwnProducts& products, float (&g)[32]) {
    const PlaceAnew place;
#pragma unroll
    for (int block = 0; block < kTriangles; ++block) {
      if (block == place.warp) finish(shared, block, join(products), g);
    }
  }
  // Multiplies keys and queries with those of earlier warps.
  __device__ __forceinline__ static void multiply_others(ChunkMemory& shared, float (&g)[32]) {
    const PlaceAnew place;
#pragma unroll
    for (int block = 0; block < kTriangles - 1; ++block) {
      if (block < place.warp) finish(shared, block, multiply_other(shared, block), g);
    }
  }
};

template <Type kType>
using Config = KdaChunksConfig<kType>;

}  // namespace fovea::kernels::cuda
