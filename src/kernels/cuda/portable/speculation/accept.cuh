// SPDX-License-Identifier: Apache-2.0
// Acceptance: a warp walks down a request's tree by the model's tokens; blocks do so by
// probabilities, because rejections need sums over the vocabulary.
#pragma once

#include "kernels/cuda/common/counters.cuh"
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

// The blocks of a request walk down its tree alike. Then each sums a part of what is left of the
// model's distribution, and the last one to arrive draws the token from it.
struct AcceptSampledConfig {
  using Params = AcceptSampledParams;
  static constexpr int kThreads = 512;
  static constexpr int kBlocksPerSm = 1;  // with two, the walk spills registers
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kAtOnce = 10;        // loads of a lane that are in flight together
  static constexpr int kTiles = kSumTiles;  // consecutive tokens, which a warp sums
  static_assert(kTiles == kThreads, "a thread has the sum of one tile");

  struct Shared {
    Residual residual;
    double tiles[kTiles];
    double warps[kWarps];  // sums of a scan
    double total;
    double before;  // sum before the found tile
    int32_t found;  // tile or token
    uint32_t arrived;
  };
  static constexpr KernelTraits kTraits = {kThreads, sizeof(Shared), 1, 0};

  // A block as accept_sampled() sees it.
  class Block {
   public:
    __device__ Block(Shared& shared, const Params& params)
        : shared_(shared),
          sums_(params.sums),
          vocabulary_(params.vocabulary),
          tile_(((params.vocabulary + kTiles - 1) / kTiles + 31) / 32 * 32) {}

    __device__ Residual& residual() { return shared_.residual; }
    __device__ bool leads() const { return threadIdx.x == 0; }
    __device__ void wait() const { __syncthreads(); }

    __device__ double sum(const float* p, const float* q) {
      sum_tiles(p, q, 0, kTiles);
      scan(shared_.tiles[threadIdx.x]);
      return shared_.total;
    }

    // Sums the tiles of this block, and takes those of the others if it is the last.
    __device__ bool is_last(const float* p, const float* q) {
      const int parts = static_cast<int>(gridDim.y), part = static_cast<int>(blockIdx.y);
      const int first = kTiles * part / parts, end = kTiles * (part + 1) / parts;
      sum_tiles(p, q, first, end);
      summed_ = true;
      if (parts == 1) return true;
      const int tile = static_cast<int>(threadIdx.x);
      double* const tiles = sums_.tiles + static_cast<int64_t>(blockIdx.x) * kTiles;
      if (tile >= first && tile < end) tiles[tile] = shared_.tiles[tile];
      __syncthreads();
      if (threadIdx.x == 0) {
        shared_.arrived = increment_acquire_release(sums_.arrived + blockIdx.x, gridDim.y - 1);
      }
      __syncthreads();
      if (shared_.arrived != gridDim.y - 1) return false;
      shared_.tiles[tile] = tiles[tile];
      __syncthreads();
      return true;
    }

    __device__ int32_t draw(const float* p, const float* q, double uniform) {
      if (!summed_) sum_tiles(p, q, 0, kTiles);
      summed_ = false;
      const double before = scan(shared_.tiles[threadIdx.x]);
      const double total = shared_.total;
      if (!(total > 0)) return -1;
      const double target = uniform * total;
      const int tile = first_passed(before + shared_.tiles[threadIdx.x] > target, kTiles - 1);
      if (static_cast<int>(threadIdx.x) == tile) shared_.before = before;
      __syncthreads();
      return find(p, q, tile, target - shared_.before);
    }

   private:
    __device__ double at(const float* p, const float* q, int32_t token, int32_t end) const {
      if (token >= end) return 0;
      return residual_at(shared_.residual, p[token], q == nullptr ? 0 : q[token], token);
    }

    // Returns the sum of the values of the threads before this one; shared_.total is that of all.
    __device__ double scan(double value) {
      const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
      double sum = value;
      for (int up = 1; up < 32; up *= 2) {
        const double lower = __shfl_up_sync(~0u, sum, up);
        if (lane >= up) sum += lower;
      }
      __syncthreads();
      if (lane == 31) shared_.warps[warp] = sum;
      double before = __shfl_up_sync(~0u, sum, 1);
      if (lane == 0) before = 0;
      __syncthreads();
      double base = 0, total = 0;
      for (int i = 0; i < kWarps; ++i) {
        if (i == warp) base = total;
        total += shared_.warps[i];
      }
      if (threadIdx.x == 0) shared_.total = total;
      __syncthreads();
      return base + before;
    }

    // Returns the first thread for which `passed` is true, or `otherwise`.
    __device__ int32_t first_passed(bool passed, int32_t otherwise) {
      if (threadIdx.x == 0) shared_.found = kThreads;
      __syncthreads();
      const uint32_t mask = __ballot_sync(~0u, passed);
      if (mask != 0 && threadIdx.x % 32 == 0) {
        atomicMin(&shared_.found, static_cast<int32_t>(threadIdx.x) + __ffs(mask) - 1);
      }
      __syncthreads();
      const int32_t found = shared_.found;
      __syncthreads();
      return found < kThreads ? found : otherwise;
    }

    // Returns the last thread for which `live` is true, or -1.
    __device__ int32_t last_live(bool live) {
      if (threadIdx.x == 0) shared_.found = -1;
      __syncthreads();
      const uint32_t mask = __ballot_sync(~0u, live);
      if (mask != 0 && threadIdx.x % 32 == 0) {
        atomicMax(&shared_.found, static_cast<int32_t>(threadIdx.x) + 31 - __clz(mask));
      }
      __syncthreads();
      const int32_t found = shared_.found;
      __syncthreads();
      return found;
    }

    // The residual after at most one rejection, which most draws come from, in registers.
    struct OneRound {
      bool rejected, drawn;
      int32_t token;
      double p_scale, q_scale;
      __device__ explicit OneRound(const Residual& residual)
          : rejected(residual.rounds > 0),
            drawn(residual.drawn != 0),
            token(rejected ? residual.tokens[0] : -1),
            p_scale(rejected ? residual.p_scale[0] : 1),
            q_scale(rejected ? residual.q_scale[0] : 0) {}
      // Returns what residual_at() does.
      __device__ double at(float p, float q, int32_t at) const {
        const double left = p;
        if (!rejected) return left;
        const double proposed = drawn ? q * q_scale : at == token ? 1.0 : 0.0;
        return left > proposed ? (left - proposed) * p_scale : 0.0;
      }
    };

    // Sums tiles [first, end), each in the same order whichever block does it.
    __device__ void sum_tiles(const float* p, const float* q, int first, int end) {
      __syncthreads();
      const Residual& residual = shared_.residual;
      if (residual.rounds > 1) {
        sum_tiles(p, q, first, end, [&](float p_at, float q_at, int32_t token) {
          return residual_at(residual, p_at, q_at, token);
        });
      } else {
        const OneRound one(residual);
        sum_tiles(p, q, first, end, [one](float p_at, float q_at, int32_t token) {
          return one.at(p_at, q_at, token);
        });
      }
    }

    template <typename Weight>
    __device__ __noinline__ void sum_tiles(const float* p, const float* q, int first, int end,
                                           Weight weight) {
      const int lane = threadIdx.x % 32;
      for (int tile = first + threadIdx.x / 32; tile < end; tile += kWarps) {
        const int32_t tile_end = min((tile + 1) * tile_, vocabulary_);
        double sum = 0;
        for (int32_t token = tile * tile_ + lane; token < tile_end; token += 32 * kAtOnce) {
          float p_at[kAtOnce], q_at[kAtOnce];
#pragma unroll
          for (int i = 0; i < kAtOnce; ++i) {
            const bool exists = token + 32 * i < tile_end;
            p_at[i] = exists ? p[token + 32 * i] : 0;
            q_at[i] = exists && q != nullptr ? q[token + 32 * i] : 0;
          }
#pragma unroll
          for (int i = 0; i < kAtOnce; ++i) {
            sum += weight(p_at[i], q_at[i], token + 32 * i);
          }
        }
        for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
        if (lane == 0) shared_.tiles[tile] = sum;
      }
      __syncthreads();
    }

    // Returns the token of a tile at which the running sum passes `rest`; if rounding leaves none,
    // the last one before the tile's end that has any weight.
    __device__ __noinline__ int32_t find(const float* p, const float* q, int tile, double rest) {
      for (; tile >= 0; --tile) {
        const int32_t begin = tile * tile_, end = min(begin + tile_, vocabulary_);
        double before = 0;
        int32_t last = -1;
        for (int32_t step = begin; step < end; step += kThreads) {
          const double weight = at(p, q, step + static_cast<int32_t>(threadIdx.x), end);
          const double sum = before + scan(weight) + weight;
          const int32_t passed = first_passed(weight > 0 && sum > rest, -1);
          if (passed >= 0) return step + passed;
          const int32_t live = last_live(weight > 0);
          if (live >= 0) last = step + live;
          before += shared_.total;
          __syncthreads();
        }
        if (last >= 0) return last;
      }
      return -1;
    }

    Shared& shared_;
    const PartSums sums_;
    int32_t vocabulary_;
    int tile_;
    bool summed_ = false;  // shared_.tiles are those of the residual
  };

  __device__ static void run(const Params& params) {
    wait_and_allow_next();
    extern __shared__ __align__(8) char dynamic_shared[];
    Block block(*reinterpret_cast<Shared*>(dynamic_shared), params);
    kernels::accept_sampled(params, static_cast<int32_t>(blockIdx.x), block);
  }
};

}  // namespace fovea::kernels::cuda
