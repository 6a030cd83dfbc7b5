// SPDX-License-Identifier: Apache-2.0
// From device-side lengths to the work of mla_decode, in one block and without the host. A part of
// a row tile costs two passes over its accumulators (32 values a key's worth: written, read and
// merged), so tiles are cut only where that buys balance:
//
//   pieces  no more tiles than workers: tile i is cut into ceil(blocks_i / p) equal pieces, one a
//   worker,
//           p being the smallest of 32 candidates for which the workers suffice
//   whole   more tiles than workers, and dealing whole tiles costs little: nobody's tiles are cut
//   line    otherwise: the tiles stand in a line, worker w has the stretch [w, w + 1) * total /
//   workers
#pragma once

#include "kernels/cuda/common/mla_params.h"
#include "kernels/cuda/common/visibility.cuh"

namespace fovea::kernels::cuda {

constexpr int kPlanThreads = 1024;
// What an item costs besides its keys, in blocks of 64 keys: queries, a first tile without overlap,
// output.
constexpr int kItemBlocks = 2;
// Blocks by which the busiest worker may lag to keep tiles whole.
constexpr int kWholeSlack = 4;

struct PlannedTile {
  RequestView view;
  int first_row;
  int key_end;
  __device__ int blocks() const { return (key_end + kBlockKeys - 1) / kBlockKeys; }
};

template <int kRowTile>
struct MlaPlanConfig {
  using Params = MlaPlanParams;
  static constexpr int kBlocksPerSm = 1;

  struct SharedMemory {
    long long warp_totals[kPlanThreads / 32];
    long long total;
    int tile_begin[kPlanThreads];  // of 1024 requests at a time
    RequestView views[kPlanThreads];
    PlannedTile tiles[kMlaMaxWorkers];
    int piece_begin[kMlaMaxWorkers + 1];
    int enough[32];  // candidates for which the workers suffice
    int most_blocks;
  };
  static constexpr KernelTraits kTraits = {kPlanThreads, sizeof(SharedMemory), kRowTile,
                                           kBlockKeys};

  // Sum over the threads before this one; `total` is that of all.
  __device__ static long long exclusive_scan(long long value, long long& total,
                                             SharedMemory& shared) {
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    long long sum = value;
    for (int step = 1; step < 32; step *= 2) {
      const long long before = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += before;
    }
    __syncthreads();  // the memory may still be read from the last scan
    if (lane == 31) shared.warp_totals[warp] = sum;
    __syncthreads();
    if (warp == 0) {
      const long long own = shared.warp_totals[lane];
      long long warps = own;
      for (int step = 1; step < 32; step *= 2) {
        const long long before = __shfl_up_sync(~0u, warps, step);
        if (lane >= step) warps += before;
      }
      shared.warp_totals[lane] = warps - own;
      if (lane == 31) shared.total = warps;
    }
    __syncthreads();
    total = shared.total;
    return shared.warp_totals[warp] + sum - value;
  }

  // Calls visit(number, tile, exists) for every row tile, 1024 at a time, with all threads: those
  // without a tile too, so that visit may synchronise.
  template <typename Visit>
  __device__ static int for_tiles(const Params& params, SharedMemory& shared, Visit visit) {
    const BatchParams& batch = params.batch;
    int done = 0;
    for (int base = 0; base < batch.requests; base += kPlanThreads) {
      const int request = base + static_cast<int>(threadIdx.x);
      RequestView view = {};
      if (request < batch.requests && !(params.skip && params.skip[request])) {
        view = request_view(batch, request);
      }
      long long count;
      const int before = static_cast<int>(
          exclusive_scan((view.q_len * batch.q_heads + kRowTile - 1) / kRowTile, count, shared));
      shared.views[threadIdx.x] = view;
      shared.tile_begin[threadIdx.x] = before;
      __syncthreads();
      for (int first = 0; first < count; first += kPlanThreads) {
        const int number = first + static_cast<int>(threadIdx.x);
        PlannedTile tile = {};
        if (number < count) {
          int low = 0;
          int high = min(kPlanThreads, batch.requests - base);
          while (high - low > 1) {
            const int middle = (low + high) / 2;
            (shared.tile_begin[middle] <= number ? low : high) = middle;
          }
          tile.view = shared.views[low];
          tile.first_row = (number - shared.tile_begin[low]) * kRowTile;
          const int last =
              (min(tile.first_row + kRowTile, tile.view.q_len * batch.q_heads) - 1) / batch.q_heads;
          tile.key_end = max(visible_keys(batch.mask, tile.view, last, last).end, 0);
        }
        visit(done + number, tile, number < count);
      }
      done += static_cast<int>(count);
      __syncthreads();
    }
    return done;
  }

  __device__ static MlaItem item_of(const PlannedTile& tile, int from, int to, int partial) {
    return {tile.view.request,
            tile.view.q_begin,
            tile.view.q_len,
            tile.view.kv_len,
            tile.first_row,
            from * kBlockKeys,
            min(to * kBlockKeys, tile.key_end),
            partial};
  }
  __device__ static MlaMerge merge_of(const PlannedTile& tile, int worker, int count) {
    return {tile.view.q_begin, tile.view.q_len, tile.first_row, 2 * worker + 1, count};
  }

  // No more tiles than workers; shared.tiles has them all.
  __device__ static void plan_pieces(const MlaWorkList& work, int tiles, long long blocks,
                                     bool whole, SharedMemory& shared) {
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int least = max(static_cast<int>((blocks + work.workers - 1) / work.workers), 1);
    const auto size = [&](int candidate) {
      return candidate == 31 ? max(shared.most_blocks, 1) : least + (least * candidate + 15) / 16;
    };
    int pieces = 0;
    for (int i = lane; i < tiles; i += 32) {
      pieces += max((shared.tiles[i].blocks() + size(warp) - 1) / size(warp), 1);
    }
    for (int step = 1; step < 32; step *= 2) pieces += __shfl_xor_sync(~0u, pieces, step);
    if (lane == 0) shared.enough[warp] = pieces <= work.workers;
    __syncthreads();
    const int piece = size(whole ? 31 : __ffs(__ballot_sync(~0u, shared.enough[lane])) - 1);
    const int own = static_cast<int>(threadIdx.x) < tiles
                        ? max((shared.tiles[threadIdx.x].blocks() + piece - 1) / piece, 1)
                        : 0;
    long long total;
    const int before = static_cast<int>(exclusive_scan(own, total, shared));
    if (static_cast<int>(threadIdx.x) < tiles) shared.piece_begin[threadIdx.x] = before;
    if (threadIdx.x == 0) shared.piece_begin[tiles] = static_cast<int>(total);
    __syncthreads();
    const int worker = threadIdx.x;
    if (worker >= total) return;
    int low = 0;
    int high = tiles;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (shared.piece_begin[middle] <= worker ? low : high) = middle;
    }
    const PlannedTile tile = shared.tiles[low];
    const int first = shared.piece_begin[low];
    const int count = shared.piece_begin[low + 1] - first;
    const int n = worker - first;
    const int slot = count == 1 ? -1 : n == 0 ? 2 * worker + 1 : 2 * worker;
    const MlaItem item =
        item_of(tile, tile.blocks() * n / count, tile.blocks() * (n + 1) / count, slot);
    work.items[worker] = item;
    work.ranges[worker] = {worker, worker + 1, {}, item};
    if (n == 0 && count > 1) work.merges[worker] = merge_of(tile, worker, count);
  }

  // Parts of the tile that begins at `start` of the line; the item of (tile, worker) is tile +
  // worker.
  __device__ static void write_tile(const MlaWorkList& work, const PlannedTile& tile, int number,
                                    long long start, long long share, bool is_last) {
    const int first = static_cast<int>(start / share);
    int worker = first;
    int from = 0;
    if (first * share == start) work.ranges[first].begin = number + first;
    for (;; ++worker) {
      const long long next = (worker + 1) * share - start;
      const bool last = next >= tile.blocks();
      const int to = last ? tile.blocks() : static_cast<int>(next);
      const bool whole = last && worker == first;
      work.items[number + worker] = item_of(tile, from, to,
                                            whole             ? -1
                                            : worker == first ? 2 * worker + 1
                                                              : 2 * worker);
      if (last) break;
      work.ranges[worker].end = number + worker + 1;
      work.ranges[worker + 1].begin = number + worker + 1;
      from = to;
    }
    // A boundary between the last block and the end of the tile's cost: the next worker begins with
    // the next tile.
    const long long end = start + tile.blocks() + kItemBlocks;
    const int end_worker = static_cast<int>((end - 1) / share);
    if (is_last || end_worker > worker || end % share == 0)
      work.ranges[worker].end = number + worker + 1;
    if (end_worker > worker && end % share != 0)
      work.ranges[end_worker].begin = number + 1 + end_worker;
    if (worker > first) work.merges[first] = merge_of(tile, first, worker - first + 1);
  }

  // Returns whether ranges have their first items already.
  __device__ static bool plan(const Params& params) {
    extern __shared__ __align__(16) char dynamic_shared[];
    auto& shared = *reinterpret_cast<SharedMemory*>(dynamic_shared);
    const MlaWorkList& work = params.work;
    for (int worker = threadIdx.x; worker < work.workers; worker += kPlanThreads) {
      work.ranges[worker].begin = work.ranges[worker].end = 0;
      work.merges[worker].count = 0;
    }
    if (threadIdx.x == 0) shared.most_blocks = 0;
    long long blocks = 0;
    const int tiles =
        for_tiles(params, shared, [&](int number, const PlannedTile& tile, bool exists) {
          long long sum;
          exclusive_scan(exists ? tile.blocks() : 0, sum, shared);
          blocks += sum;
          if (exists) atomicMax(&shared.most_blocks, tile.blocks());
          if (exists && number < kMlaMaxWorkers) shared.tiles[number] = tile;
        });
    __syncthreads();
    if (tiles == 0) return true;
    if (tiles <= work.workers) {
      plan_pieces(work, tiles, blocks, params.whole_tiles, shared);
      return true;
    }
    const long long cost = blocks + static_cast<long long>(tiles) * kItemBlocks;
    const long long share = (cost + work.workers - 1) / work.workers;
    const int dealt = (tiles + work.workers - 1) / work.workers;
    if (params.whole_tiles ||
        static_cast<long long>(dealt) * (shared.most_blocks + kItemBlocks) <= share + kWholeSlack) {
      for (int worker = threadIdx.x; worker < work.workers; worker += kPlanThreads) {
        work.ranges[worker].begin =
            static_cast<int>(static_cast<long long>(tiles) * worker / work.workers);
        work.ranges[worker].end =
            static_cast<int>(static_cast<long long>(tiles) * (worker + 1) / work.workers);
      }
      for_tiles(params, shared, [&](int number, const PlannedTile& tile, bool exists) {
        if (exists) work.items[number] = item_of(tile, 0, tile.blocks(), -1);
      });
      return false;
    }
    long long line = 0;
    for_tiles(params, shared, [&](int number, const PlannedTile& tile, bool exists) {
      long long sum;
      const long long start =
          line + exclusive_scan(exists ? tile.blocks() + kItemBlocks : 0, sum, shared);
      line += sum;
      if (exists) write_tile(work, tile, number, start, share, number == tiles - 1);
    });
    return false;
  }

  __device__ static void run(const Params& params) {
    const MlaWorkList& work = params.work;
    if (plan(params)) return;
    __syncthreads();
    for (int worker = threadIdx.x; worker < work.workers; worker += kPlanThreads) {
      MlaRange& range = work.ranges[worker];
      if (range.begin < range.end) range.first = work.items[range.begin];
    }
  }
};

template <int kRowTile>
using Config = MlaPlanConfig<kRowTile>;

}  // namespace fovea::kernels::cuda
