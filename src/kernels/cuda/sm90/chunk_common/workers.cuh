// SPDX-License-Identifier: Apache-2.0
// The tasks of *_chunks. A block has three workers of one warpgroup each, and a multiprocessor one
// block, so that blocks without tasks make room for whole blocks of *_states.
#pragma once

#include "kernels/cuda/sm90/chunk_common/progress.cuh"
#include "kernels/cuda/sm90/chunk_common/tiles.cuh"

namespace fovea::kernels::cuda {

constexpr int kWorkers = 3;

// Returns the number of a thread in its worker.
__device__ __forceinline__ int thread_of_worker() { return thread_anew() % kWarpgroupThreads; }

struct Worker {
  // The same in all threads of a worker, and known to be so.
  int number = __shfl_sync(~0u, thread_anew() / kWarpgroupThreads, 0);

  // Waits for the worker's threads.
  __device__ __forceinline__ void sync() const {
    named_barrier_wait(1 + number, kWarpgroupThreads);
  }
};

// The tasks of all blocks, in the order of chunks. All blocks take the first ones in turn. Then
// blocks end, so that *_states finds a multiprocessor for each of its tasks, and the others take
// the later ones meanwhile.
struct WorkerTasks {
  int count, first;  // all tasks, and those for all blocks
  int staying;       // blocks that take later ones

  // `heads` tasks a chunk. `pace`: tasks that a block ends while a state goes through 64 chunks.
  __device__ __forceinline__ WorkerTasks(const ChunkParams& params, int heads, int pace) {
    const ChunkCounts counts = *params.plan.counts;
    const auto blocks = static_cast<int>(gridDim.x);
    const int states = counts.early * params.value_heads * (params.value_dim / kBlockValues);
    const int idle = params.multiprocessors - blocks;
    count = counts.chunks * heads;
    staying = max(blocks - max(states - idle, 0), 0);
    const int later = counts.chain * pace / 64 * staying;
    first = max(count - later, 0);
    // Segments begin once the last block has ended its first tasks; so rather whole rounds of them.
    const int whole = first - first % (kWorkers * blocks);
    if (counts.early < counts.walks && count - whole <= 2 * later) first = whole;
  }

  __device__ __forceinline__ int begin(Worker worker) const {
    const int task = worker.number * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x);
    return task < first ? task : begin_later(worker);
  }
  // Returns the worker's next task, or one from `count` on if it has no more.
  __device__ __forceinline__ int after(int task, Worker worker) const {
    if (task >= first) return task + kWorkers * staying;
    task += kWorkers * static_cast<int>(gridDim.x);
    return task < first ? task : begin_later(worker);
  }

 private:
  __device__ __forceinline__ int begin_later(Worker worker) const {
    const auto block = static_cast<int>(blockIdx.x);
    return block < staying ? first + worker.number * staying + block : count;
  }
};

}  // namespace fovea::kernels::cuda
