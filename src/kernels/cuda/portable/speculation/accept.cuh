// SPDX-License-Identifier: Apache-2.0
// Acceptance: a warp walks down a request's tree by the model's tokens; a block does so by
// probabilities, because rejections need sums over the vocabulary.
#pragma once

#include "kernels/cuda/portable/speculation/config.cuh"

namespace fovea::kernels::cuda {

struct AcceptTokensConfig {
  using Params = AcceptTokensParams;
  static constexpr int kBlocksPerSm = 1;
  static constexpr KernelTraits kTraits = {32, 0, 1, 0};

  // Each lane keeps two nodes.
  __device__ static void run(const Params& params) {
    wait_and_allow_next();
    const DraftTrees& trees = params.trees;
    const int request = static_cast<int>(blockIdx.x), lane = static_cast<int>(threadIdx.x);
    AcceptedPath path(trees, params.accepted, request, lane == 0);
    if (trees.lens[request] < 0) return path.end(-1);
    const int64_t first = static_cast<int64_t>(request) * trees.width;
    int32_t parents[2], tokens[2], targets[2];
    for (int half = 0; half < 2; ++half) {
      const int node = lane + 32 * half;
      const bool exists = node < trees.width;
      parents[half] = exists ? parent_of(trees, request, node) : -1;
      tokens[half] = exists ? trees.tokens[first + node] : -1;
      targets[half] = exists ? params.target[first + node] : -1;
    }
    for (int node = 0;;) {
      path.add(node);
      const int32_t low = __shfl_sync(~0u, targets[0], node % 32);
      const int32_t high = __shfl_sync(~0u, targets[1], node % 32);
      const int32_t target = node < 32 ? low : high;
      uint32_t found[2];
      for (int half = 0; half < 2; ++half) {
        found[half] = __ballot_sync(~0u, parents[half] == node && tokens[half] == target);
      }
      if ((found[0] | found[1]) == 0) return path.end(target);
      node = found[0] != 0 ? __ffs(found[0]) - 1 : 31 + __ffs(found[1]);
    }
  }
};

struct AcceptSampledConfig {
  using Params = AcceptSampledParams;
  static constexpr int kThreads = 512;
  static constexpr int kBlocksPerSm = 1;
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kAtOnce = 16;  // loads of a lane that are in flight together
  static constexpr int kTiles = 128;  // consecutive tokens, which a warp sums

  struct Shared {
    Residual residual;
    double tiles[kTiles];
    double before;  // sum of the tiles before the one with the token
    int32_t token;
  };
  static constexpr KernelTraits kTraits = {kThreads, sizeof(Shared), 1, 0};

  // The block as accept_sampled() sees it.
  class Block {
   public:
    __device__ Block(Shared& shared, int32_t vocabulary)
        : shared_(shared),
          vocabulary_(vocabulary),
          tile_(((vocabulary + kTiles - 1) / kTiles + 31) / 32 * 32) {}

    __device__ Residual& residual() { return shared_.residual; }
    __device__ bool leads() const { return threadIdx.x == 0; }
    __device__ void wait() const { __syncthreads(); }

    // Every thread adds the tiles in the same order.
    __device__ double sum(const float* p, const float* q) {
      sum_tiles(p, q);
      double total = 0;
      for (int tile = 0; tile < kTiles; ++tile) total += shared_.tiles[tile];
      return total;
    }

    __device__ int32_t draw(const float* p, const float* q, double uniform) {
      const double total = sum(p, q);
      if (!(total > 0)) return -1;
      const double target = uniform * total;
      double before = 0;
      int tile = 0;
      for (; tile + 1 < kTiles; ++tile) {
        const double next = before + shared_.tiles[tile];
        if (next > target) break;
        before = next;
      }
      __syncthreads();
      if (threadIdx.x < 32) find(p, q, tile, target - before);
      __syncthreads();
      const int32_t token = shared_.token;
      __syncthreads();
      return token;
    }

   private:
    __device__ double at(const float* p, const float* q, int32_t token) const {
      if (token >= vocabulary_) return 0;
      return residual_at(shared_.residual, p[token], q == nullptr ? 0 : q[token], token);
    }

    // Not inlined, because of its copies of residual_at().
    __device__ __noinline__ void sum_tiles(const float* p, const float* q) {
      __syncthreads();
      const int lane = threadIdx.x % 32;
      for (int tile = threadIdx.x / 32; tile < kTiles; tile += kWarps) {
        const int32_t end = min((tile + 1) * tile_, vocabulary_);
        double sum = 0;
        for (int32_t token = tile * tile_ + lane; token < end; token += 32 * kAtOnce) {
          float p_at[kAtOnce], q_at[kAtOnce];
#pragma unroll
          for (int i = 0; i < kAtOnce; ++i) {
            const bool exists = token + 32 * i < end;
            p_at[i] = exists ? p[token + 32 * i] : 0;
            q_at[i] = exists && q != nullptr ? q[token + 32 * i] : 0;
          }
#pragma unroll
          for (int i = 0; i < kAtOnce; ++i) {
            sum += residual_at(shared_.residual, p_at[i], q_at[i], token + 32 * i);
          }
        }
        for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
        if (lane == 0) shared_.tiles[tile] = sum;
      }
      __syncthreads();
    }

    // Finds the token of a tile at which the running sum passes `rest`; if rounding leaves none,
    // the last one before the tile's end that has any weight.
    __device__ __noinline__ void find(const float* p, const float* q, int tile, double rest) {
      const int lane = threadIdx.x;
      double before = 0;
      int32_t last = -1;
      for (; last < 0 && tile >= 0; --tile) {
        for (int step = 0; step < tile_; step += 32) {
          const int32_t token = tile * tile_ + step + lane;
          const double weight = at(p, q, token);
          double sum = weight;
          for (int up = 1; up < 32; up *= 2) {
            const double lower = __shfl_up_sync(~0u, sum, up);
            if (lane >= up) sum += lower;
          }
          const uint32_t live = __ballot_sync(~0u, weight > 0);
          const uint32_t passed = __ballot_sync(~0u, weight > 0 && before + sum > rest);
          if (live != 0) last = tile * tile_ + step + 31 - __clz(live);
          if (passed != 0) {
            last = tile * tile_ + step + __ffs(passed) - 1;
            break;
          }
          before += __shfl_sync(~0u, sum, 31);
        }
      }
      if (lane == 0) shared_.token = last;
    }

    Shared& shared_;
    int32_t vocabulary_;
    int tile_;
  };

  __device__ static void run(const Params& params) {
    wait_and_allow_next();
    extern __shared__ __align__(8) char dynamic_shared[];
    Block block(*reinterpret_cast<Shared*>(dynamic_shared), params.vocabulary);
    kernels::accept_sampled(params, static_cast<int32_t>(blockIdx.x), block);
  }
};

}  // namespace fovea::kernels::cuda
