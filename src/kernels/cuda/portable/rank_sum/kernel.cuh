// SPDX-License-Identifier: Apache-2.0
// Sums over the GPUs of a process: every rank writes its values into the memory of the others and
// adds those that it gets, so that a sum takes one crossing of the link. For a few rows, where the
// time is latency.
#pragma once

#include "kernels/cuda/common/counters.cuh"
#include "kernels/cuda/common/peer_memory.cuh"
#include "kernels/cuda/common/rank_sum_params.h"
#include "kernels/cuda/portable/layer_ops/norms.cuh"

namespace fovea::kernels::cuda {

enum SumOp { values };  // the other is `residual` of layer_ops

// One message of this rank, and those of the others.
class Messages {
 public:
  // All threads of the grid, before any of them ends.
  __device__ explicit Messages(const RankMessages& params) : params_(params) {
    const uint32_t last = load_shared_word(&params.counters->epoch);
    epoch_ = last == ~0u ? 2 : last + 1;  // 0 marks words that were never written
  }

  // Sends four values at position `at` of the message, a multiple of 4.
  __device__ void send(int64_t at, float4 four) const {
    for (int rank = 0; rank < params_.ranks; ++rank) {
      if (rank == params_.rank) continue;
      uint32_t* const to = word(rank, params_.rank, at);
      store_marked(to, {__float_as_uint(four.x), epoch_, __float_as_uint(four.y), epoch_});
      store_marked(to + kSecondPair,
                   {__float_as_uint(four.z), epoch_, __float_as_uint(four.w), epoch_});
    }
  }

  // Replaces this rank's values by the sums over all ranks, in their order, so that all get the
  // same bits. at(i): the position of fours[i], or -1 if there is none.
  template <int kFours, class At>
  __device__ void sum(float4 (&fours)[kFours], const At& at) const {
    float4 sums[kFours] = {};
    for (int rank = 0; rank < params_.ranks; ++rank) {
      float4 theirs[kFours];
      if (rank != params_.rank) receive(rank, theirs, at);
#pragma unroll
      for (int i = 0; i < kFours; ++i) {
        const float4 four = rank == params_.rank ? fours[i] : theirs[i];
        sums[i] = {sums[i].x + four.x, sums[i].y + four.y, sums[i].z + four.z, sums[i].w + four.w};
      }
    }
#pragma unroll
    for (int i = 0; i < kFours; ++i) fours[i] = sums[i];
  }

  // The last block of the grid counts the message. All threads of every block.
  __device__ void end() const {
    __syncthreads();
    if (threadIdx.x != 0) return;
    const uint32_t last = gridDim.x - 1;
    if (increment_acquire_release(&params_.counters->finished, last) == last) {
      store_shared_word(&params_.counters->epoch, epoch_);
    }
  }

 private:
  static constexpr int64_t kSecondPair = word_of_value(2);

  // Where rank `to` finds the four values of rank `from`.
  __device__ uint32_t* word(int to, int from, int64_t at) const {
    const int64_t box = static_cast<int64_t>(epoch_ % 2) * params_.ranks + from;
    return params_.inboxes[to] + 2 * box * params_.capacity + word_of_value(at);
  }

  // Waits for all values of the thread at once, because each load takes long.
  template <int kFours, class At>
  __device__ void receive(int rank, float4 (&fours)[kFours], const At& at) const {
    constexpr uint32_t kTriesAtOnce = 256;
    int64_t begin = 0;
    for (uint32_t tries = 1;; ++tries) {
      bool arrived = true;
#pragma unroll
      for (int i = 0; i < kFours; ++i) {
        fours[i] = {0, 0, 0, 0};
        if (at(i) < 0) continue;
        const uint32_t* const from = word(params_.rank, rank, at(i));
        const MarkedPair a = load_marked(from);
        const MarkedPair b = load_marked(from + kSecondPair);
        arrived = arrived && a.first_mark == epoch_ && a.second_mark == epoch_ &&
                  b.first_mark == epoch_ && b.second_mark == epoch_;
        fours[i] = {__uint_as_float(a.first), __uint_as_float(a.second), __uint_as_float(b.first),
                    __uint_as_float(b.second)};
      }
      if (arrived || (tries % kTriesAtOnce == 0 && stops(begin))) return;
    }
  }

  // begin: when this was first asked, 0 before.
  __device__ bool stops(int64_t& begin) const {
    if (load_shared_word(params_.stop) != 0) return true;
    const int64_t now = global_nanoseconds();
    if (begin == 0) begin = now;
    if (now - begin < params_.timeout_ns) return false;
    store_shared_word(params_.stop, 1);
    return true;
  }

  const RankMessages& params_;
  uint32_t epoch_;
};

struct SumValuesConfig {
  using Params = SumValuesParams;
  static constexpr int kBlocksPerSm = 1;
  static constexpr int kThreads = 256;
  static constexpr int kFours = 2;  // per thread
  static constexpr KernelTraits kTraits = {kThreads, 0, kThreads* kFours * 4, 0};

  __device__ static void run(const Params& params) {
    wait_and_allow_next();
    const Messages messages(params.messages);
    const auto at = [&](int i) -> int64_t {
      const int64_t four = (static_cast<int64_t>(blockIdx.x) * kFours + i) * kThreads + threadIdx.x;
      return 4 * four < params.count ? 4 * four : -1;
    };
    float4 fours[kFours] = {};
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
      if (at(i) < 0) continue;
      fours[i] = *reinterpret_cast<const float4*>(params.send + at(i));
      messages.send(at(i), fours[i]);
    }
    messages.sum(fours, at);
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
      if (at(i) >= 0) *reinterpret_cast<float4*>(params.receive + at(i)) = fours[i];
    }
    messages.end();
  }
};

struct SumResidualConfig : ResidualConfig {
  using Params = SumResidualParams;

  __device__ static void run(const Params& params) {
    __shared__ float shared[kThreads / 32];
    wait_and_allow_next();
    const Messages messages(params.messages);
    const ResidualParams& residual = params.residual;
    const int64_t first = static_cast<int64_t>(blockIdx.x) * residual.dim;
    float4 fours[kFours] = {};
    for_fours(residual.dim, [&](int i, int column) {
      fours[i] = *reinterpret_cast<const float4*>(residual.branch + first + column);
      messages.send(first + column, fours[i]);
    });
    messages.sum(fours, [&](int i) -> int64_t {
      const int column = column_of(i);
      return column < residual.dim ? first + column : -1;
    });
    run_kept(residual, shared, [&](int i, int) { return fours[i]; });
    messages.end();
  }
};

template <auto kOp>
struct SumConfig;
template <>
struct SumConfig<values> : SumValuesConfig {};
template <>
struct SumConfig<residual> : SumResidualConfig {};

template <auto kOp>
using Config = SumConfig<kOp>;

}  // namespace fovea::kernels::cuda
