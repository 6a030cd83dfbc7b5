// SPDX-License-Identifier: Apache-2.0
// The row tiles of a batch and their numbers of key blocks.
#pragma once

#include "kernels/cuda/common/division.cuh"
#include "kernels/cuda/common/mla_params.h"
#include "kernels/cuda/common/scan.cuh"
#include "kernels/cuda/common/visibility.cuh"

namespace fovea::kernels::cuda {

constexpr int kPlanThreads = 512;
constexpr int kPlanWarps = kPlanThreads / 32;

struct PlannedTile {
  RequestView view;
  int first_row;
  int key_end;
  __device__ int blocks() const { return (key_end + kBlockKeys - 1) / kBlockKeys; }
  __device__ int length() const { return max(blocks(), 1); }  // in the line of tiles
};

template <int kRowTile>
struct MlaTiles {
  struct Memory {
    ScanMemory<int> counts;
    int tile_begin[kPlanThreads];  // first tile of each request of a round, unless all are alike
    RequestView views[kPlanThreads];
    int64_t warp_blocks[kPlanWarps];
    int warp_max[kPlanWarps], warp_min[kPlanWarps];  // blocks of a tile
  };

  // A thread's tile of one round.
  struct Visited {
    PlannedTile tile;
    int number;
    bool exists;
  };
  struct Totals {
    int tiles;
    int64_t blocks;  // empty tiles count as one
    int max, min;    // blocks of a tile
    __device__ bool alike() const { return max == min; }
  };

  // Returns the quotient rounded down. For small values it takes a few instructions instead of the
  // compiler's dozens.
  __device__ static int divided(int value, int by) {
    return value < 1 << 21 ? short_quotient(value, by) : value / by;
  }
  __device__ static int64_t divided(int64_t value, int64_t by) {
    return (value | by) < 1 << 21 ? short_quotient(static_cast<int>(value), static_cast<int>(by))
                                  : quotient(value, by);
  }
  __device__ static int tiles_of(const BatchParams& batch, int q_len) {
    return (q_len * batch.q_heads + kRowTile - 1) / kRowTile;
  }
  __device__ static RequestView view_of(const MlaPlanParams& params, int request) {
    if (request >= params.batch.requests) return {};
    const RequestView view = request_view(params.batch, request);
    return params.skip && params.skip[request] ? RequestView{} : view;
  }

  // Calls visit(Visited) for every row tile, kPlanThreads at a time, from all threads, also those
  // without a tile, so that visit may synchronise. `view` is that of request threadIdx.x. Returns
  // the number of tiles. Callers synchronise before they call it again.
  template <typename Visit>
  __device__ static int for_tiles(const MlaPlanParams& params, RequestView view, Memory& shared,
                                  Visit visit) {
    const BatchParams& batch = params.batch;
    // If all requests have as many tiles as the first, as in decode, there is nothing to sum or
    // search.
    const int usual =
        tiles_of(batch, batch.requests > 0 ? batch.q_indptr[1] - batch.q_indptr[0] : 0);
    int done = 0;
    for (int base = 0; base < batch.requests; base += kPlanThreads) {
      const int requests = min(kPlanThreads, batch.requests - base);
      if (base > 0) {
        view = view_of(params, base + static_cast<int>(threadIdx.x));
        __syncthreads();
      }
      shared.views[threadIdx.x] = view;
      const int own = tiles_of(batch, view.q_len);
      const bool alike =
          !__syncthreads_or(static_cast<int>(threadIdx.x) < requests && own != usual) && usual > 0;
      int count = requests * usual;
      if (!alike) {
        shared.tile_begin[threadIdx.x] = exclusive_scan(own, count, shared.counts);
        __syncthreads();
      }
      for (int first = 0; first < count; first += kPlanThreads) {
        const int number = first + static_cast<int>(threadIdx.x);
        Visited at = {{}, done + number, number < count};
        if (at.exists) {
          int low = 0;
          int begin;
          if (alike) {
            low = divided(number, usual);
            begin = low * usual;
          } else {
            int high = requests;
            while (high - low > 1) {
              const int middle = (low + high) / 2;
              (shared.tile_begin[middle] <= number ? low : high) = middle;
            }
            begin = shared.tile_begin[low];
          }
          PlannedTile& tile = at.tile;
          tile.view = shared.views[low];
          tile.first_row = (number - begin) * kRowTile;
          const int rows = min(tile.first_row + kRowTile, tile.view.q_len * batch.q_heads);
          const int last = divided(rows - 1, batch.q_heads);
          tile.key_end = max(visible_keys(batch.mask, tile.view, last, last).end, 0);
        }
        visit(at);
      }
      done += count;
    }
    return done;
  }

  __device__ static int64_t warp_sum(int64_t value) {
    return __reduce_add_sync(~0u, static_cast<int>(value & 0xffff)) +
           (static_cast<int64_t>(__reduce_add_sync(~0u, static_cast<int>(value >> 16))) << 16);
  }
  // Returns the totals over all threads' blocks. Synchronises the block.
  __device__ static Totals totals_of(int tiles, int64_t blocks, int max, int min, Memory& shared) {
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    blocks = warp_sum(blocks);
    max = __reduce_max_sync(~0u, max);
    min = __reduce_min_sync(~0u, min);
    if (lane == 0) {
      shared.warp_blocks[warp] = blocks;
      shared.warp_max[warp] = max;
      shared.warp_min[warp] = min;
    }
    __syncthreads();
    const int held = lane < kPlanWarps ? lane : kPlanWarps - 1;
    return {tiles, warp_sum(lane < kPlanWarps ? shared.warp_blocks[lane] : 0),
            __reduce_max_sync(~0u, shared.warp_max[held]),
            __reduce_min_sync(~0u, shared.warp_min[held])};
  }
};

}  // namespace fovea::kernels::cuda
