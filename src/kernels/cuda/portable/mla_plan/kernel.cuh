// SPDX-License-Identifier: Apache-2.0
// From device-side lengths to the work of mla_decode, in one block and without the host. A part of
// a row tile costs two passes over its accumulators (32 values a key's worth: written, read and
// merged), so tiles are cut only where that buys balance:
//
//   pieces  no more tiles than workers, and equal pieces keep these busy: tile i is cut into
//           ceil(blocks_i / p) of them, one a worker, p being the smallest of 32 candidates for
//           which the workers suffice
//   whole   more tiles than workers, and dealing whole tiles in turn costs little: nobody's tiles
//           are cut
//   line    otherwise: the tiles stand in a line, of which worker w has the stretch
//           [w, w + 1) * total / workers
#pragma once

#include "kernels/cuda/common/division.cuh"
#include "kernels/cuda/common/mla_params.h"
#include "kernels/cuda/common/plan_launch.cuh"
#include "kernels/cuda/common/scan.cuh"
#include "kernels/cuda/common/visibility.cuh"

namespace fovea::kernels::cuda {

constexpr int kPlanThreads = 1024;
// What an item costs besides its keys, in blocks of 64 keys: queries, a first tile without overlap,
// output.
constexpr int kItemBlocks = 2;
// Blocks by which the busiest worker may lag to keep tiles whole, and the part of its share. The
// part for equal pieces: in a line workers have two parts each, and with fewer at work the clock is
// higher (28 x 4k 60.1 us in a line whose shares are a sixth smaller, 59.7 in pieces, 2026-11-23).
constexpr int kWholeSlack = 4;
constexpr int kWholeSlackPart = 16;
constexpr int kPiecesSlackPart = 4;
// Pieces of 128 rows have two blocks where there are more blocks than this: a second block
// costs 1.5 us, each part less makes the merge 0.1 us shorter (2026-11-22: 1 x 4k 13.4 instead
// of 15.3 us, 4 x 1k 13.0 instead of 14.3).
constexpr int kFewBlocks = 32;
// Parts of more blocks are left to the merge, which takes 4 us more. In pairs blocks with the same
// keys are no cluster, so they drift apart: 2 % of the time (2026-11-23).
constexpr int kMaxPairBlocks = 96;

struct PlannedTile {
  RequestView view;
  int first_row;
  int key_end;
  __device__ int blocks() const { return (key_end + kBlockKeys - 1) / kBlockKeys; }
};

template <int kRowTile>
struct MlaPlanConfig {
  using Params = PlanLaunch<MlaPlanParams>;
  static constexpr int kBlocksPerSm = 1;

  struct SharedMemory {
    ScanMemory<int> counts;
    ScanMemory<int64_t> blocks;
    int tile_begin[kPlanThreads];  // of 1024 requests at a time
    RequestView views[kPlanThreads];
    PlannedTile tiles[kMlaMaxWorkers];
    // Of workers that have the first piece of a tile, one bit each in begins.
    int tile_at[kMlaMaxWorkers], pieces[kMlaMaxWorkers];
    unsigned begins[kMlaMaxWorkers / 32];
    int enough[32];  // candidates for which the workers suffice
    int most_blocks;
    int begin[kMlaMaxWorkers], end[kMlaMaxWorkers];  // of the workers' ranges
  };
  static constexpr KernelTraits kTraits = {kPlanThreads, sizeof(SharedMemory), kRowTile,
                                           kBlockKeys};

  // A thread's tile of one round.
  struct Visited {
    PlannedTile tile;
    int number;
    int64_t before;  // blocks of the tiles before it
    bool exists;
  };
  struct Totals {
    int tiles;
    int64_t blocks;
  };

  // Calls visit(Visited) for every row tile, 1024 at a time, with all threads: those without a tile
  // too, so that visit may synchronise.
  template <typename Visit>
  __device__ static Totals for_tiles(const MlaPlanParams& params, SharedMemory& shared,
                                     Visit visit) {
    const BatchParams& batch = params.batch;
    Totals done = {};
    for (int base = 0; base < batch.requests; base += kPlanThreads) {
      const int request = base + static_cast<int>(threadIdx.x);
      RequestView view = {};
      if (request < batch.requests && !(params.skip && params.skip[request])) {
        view = request_view(batch, request);
      }
      int count;
      const int before = exclusive_scan((view.q_len * batch.q_heads + kRowTile - 1) / kRowTile,
                                        count, shared.counts);
      shared.views[threadIdx.x] = view;
      shared.tile_begin[threadIdx.x] = before;
      __syncthreads();
      for (int first = 0; first < count; first += kPlanThreads) {
        const int number = first + static_cast<int>(threadIdx.x);
        Visited at = {{}, done.tiles + number, 0, number < count};
        if (at.exists) {
          int low = 0;
          int high = min(kPlanThreads, batch.requests - base);
          while (high - low > 1) {
            const int middle = (low + high) / 2;
            (shared.tile_begin[middle] <= number ? low : high) = middle;
          }
          PlannedTile& tile = at.tile;
          tile.view = shared.views[low];
          tile.first_row = (number - shared.tile_begin[low]) * kRowTile;
          const int last =
              (min(tile.first_row + kRowTile, tile.view.q_len * batch.q_heads) - 1) / batch.q_heads;
          tile.key_end = max(visible_keys(batch.mask, tile.view, last, last).end, 0);
        }
        int64_t sum;
        at.before = done.blocks +
                    exclusive_scan(static_cast<int64_t>(at.tile.blocks()), sum, shared.blocks);
        done.blocks += sum;
        visit(at);
      }
      done.tiles += count;
      __syncthreads();
    }
    return done;
  }

  // Whether mla_decode joins the parts of all row tiles.
  __device__ static bool in_decode(const MlaPlanParams& params) {
    return params.joins == MlaJoins::clusters || params.joins == MlaJoins::blocks;
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

  // Blocks come in clusters of two: of one worker, or for pairs of two, which have the same rows.
  __device__ static void write_range(const MlaPlanParams& params, int worker, MlaRange range,
                                     bool pairs) {
    MlaRange* ranges = params.work.ranges;
    if (params.joins != MlaJoins::pairs) {
      ranges[worker] = range;
      return;
    }
    for (int rank = 0; rank < 2; ++rank) {
      range.rank = rank;
      ranges[pairs ? worker / 2 * 4 + rank * 2 + worker % 2 : worker * 2 + rank] = range;
    }
  }

  // Pieces of a tile that have at most `piece` blocks: in clusters a power of two, or whole
  // clusters, for a part of a cluster joins more rows a block.
  __device__ static int pieces_of(const MlaPlanParams& params, const PlannedTile& tile, int piece) {
    const int cluster = cluster_workers(params);
    const int count = max((tile.blocks() + piece - 1) / piece, 1);
    return count < cluster ? 1 << (32 - __clz(count - 1)) : (count + cluster - 1) & -cluster;
  }
  __device__ static int cluster_workers(const MlaPlanParams& params) {
    return params.joins == MlaJoins::pairs ? kPairWorkers : params.work.cluster;
  }

  // The least blocks of a piece for which the workers suffice; no more tiles than workers, all in
  // shared.tiles.
  __device__ static int find_piece(const MlaPlanParams& params, const Totals& totals,
                                   SharedMemory& shared) {
    const MlaWorkList& work = params.work;
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int least =
        max(static_cast<int>(quotient(totals.blocks + work.workers - 1, int64_t{work.workers})),
            kRowTile == 128 && totals.blocks > kFewBlocks ? 2 : 1);
    const auto size = [&](int candidate) {
      return candidate == 31 ? max(shared.most_blocks, 1) : least + (least * candidate + 15) / 16;
    };
    int pieces = 0;
    for (int i = lane; i < totals.tiles; i += 32) {
      pieces += pieces_of(params, shared.tiles[i], size(warp));
    }
    pieces = __reduce_add_sync(~0u, pieces);
    if (lane == 0) shared.enough[warp] = pieces <= work.workers;
    __syncthreads();
    return size(params.whole_tiles ? 31 : __ffs(__ballot_sync(~0u, shared.enough[lane])) - 1);
  }

  __device__ static void plan_pieces(const MlaPlanParams& params, const Totals& totals, int piece,
                                     SharedMemory& shared) {
    const MlaWorkList& work = params.work;
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int number = threadIdx.x;
    const int own = number < totals.tiles ? pieces_of(params, shared.tiles[number], piece) : 0;
    // Tiles with more pieces come first, whole clusters before all: no tile lies across two
    // clusters without need. Sums of all sizes in one scan: of 2^k pieces, or clusters of so many
    // blocks, in units of 2^k, for which 8 - k bits are enough.
    static_assert(kMlaMaxCluster <= 16 && kMlaMaxWorkers < 256);
    const int log_cluster = 31 - __clz(cluster_workers(params));
    const int kind = min(31 - __clz(own | 1), log_cluster);
    const auto place = [](int k) { return k * (17 - k) / 2; };
    const auto pieces_in = [&](int sums, int k) {
      return (sums >> place(k) & (1 << 8 - k) - 1) << k;
    };
    int sums;
    const int before = exclusive_scan(own >> kind << place(kind), sums, shared.counts);
    int total = 0;
    int begin = pieces_in(before, kind);
#pragma unroll
    for (int k = 0; k < 5; ++k) {
      const int of_kind = pieces_in(sums, k);
      if (k > kind) begin += of_kind;
      total += of_kind;
    }
    if (own > 0) {
      shared.tile_at[begin] = threadIdx.x;
      shared.pieces[begin] = own;
      atomicOr(&shared.begins[begin / 32], 1u << begin % 32);
    }
    __syncthreads();
    const int worker = threadIdx.x;
    if (worker >= total) return;
    int word = warp;
    unsigned begins = shared.begins[word] & (2u << lane) - 1;
    while (begins == 0) begins = shared.begins[--word];
    const int first = 32 * word + 31 - __clz(begins);
    const PlannedTile tile = shared.tiles[shared.tile_at[first]];
    const int count = shared.pieces[first];
    const int n = worker - first;
    const bool pairs = params.joins == MlaJoins::pairs && piece <= kMaxPairBlocks;
    const bool paired = pairs && count == 2;
    const int slot = count == 1          ? -1
                     : in_decode(params) ? parts_of_workers(first, count)
                     : paired            ? kPaired
                                         : slot_of_worker(worker, first);
    const MlaItem item =
        item_of(tile, tile.blocks() * n / count, tile.blocks() * (n + 1) / count, slot);
    work.items[worker] = item;
    write_range(params, worker, {worker, worker + 1, 1, 0, item}, pairs);
    if (n == 0 && count > 1 && !paired && !in_decode(params)) {
      work.merges[worker] = merge_of(tile, worker, count);
    }
  }

  // Tile i is worker i % workers's: neighbouring tiles, which may have the same keys, are computed
  // at the same time, and the keys are read from memory once.
  __device__ static void deal_whole(const MlaPlanParams& params, const Visited& at, int tiles) {
    if (!at.exists) return;
    const MlaWorkList& work = params.work;
    const MlaItem item = item_of(at.tile, 0, at.tile.blocks(), -1);
    work.items[at.number] = item;
    if (at.number < work.workers) {
      write_range(params, at.number, {at.number, tiles, work.workers, 0, item}, false);
    }
  }

  __device__ static int64_t line_start(const Visited& at) {
    return at.before + static_cast<int64_t>(at.number) * kItemBlocks;
  }

  // Calls visit(worker, first block, end) for each stretch of the tile. The line has kItemBlocks
  // after every tile; a tile's item of a worker is number tile + worker, so the items of a worker
  // stand in a row.
  template <typename Visit>
  __device__ static void for_stretches(const Visited& at, int64_t share, Visit visit) {
    if (!at.exists) return;
    const int64_t start = line_start(at);
    const int blocks = at.tile.blocks();
    int from = 0;
    for (int worker = static_cast<int>(quotient(start, share));; ++worker) {
      const int to =
          static_cast<int>(min((worker + 1) * share - start, static_cast<int64_t>(blocks)));
      visit(worker, from, to);
      if (to == blocks) return;
      from = to;
    }
  }

  __device__ static void write_stretches(const MlaPlanParams& params, const Visited& at,
                                         int64_t share, const SharedMemory& shared) {
    if (!at.exists) return;
    const MlaWorkList& work = params.work;
    const auto worker_of = [&](int block) {
      return static_cast<int>(quotient(line_start(at) + block, share));
    };
    const int first = worker_of(0);
    const int parts = worker_of(max(at.tile.blocks() - 1, 0)) - first + 1;
    for_stretches(at, share, [&](int worker, int from, int to) {
      const MlaItem item = item_of(at.tile, from, to,
                                   parts == 1          ? -1
                                   : in_decode(params) ? parts_of_workers(first, parts)
                                                       : slot_of_worker(worker, first));
      const int number = at.number + worker;
      work.items[number] = item;
      if (shared.begin[worker] == number) {
        write_range(params, worker, {number, shared.end[worker], 1, 0, item}, false);
      }
    });
    if (parts > 1 && !in_decode(params)) work.merges[first] = merge_of(at.tile, first, parts);
  }

  __device__ static void plan(const MlaPlanParams& params) {
    extern __shared__ __align__(16) char dynamic_shared[];
    auto& shared = *reinterpret_cast<SharedMemory*>(dynamic_shared);
    const MlaWorkList& work = params.work;
    for (int worker = threadIdx.x; worker < work.workers; worker += kPlanThreads) {
      write_range(params, worker, {}, false);
      work.merges[worker].count = 0;
      shared.begin[worker] = 0x7fffffff;
      shared.end[worker] = 0;
    }
    const int counters = work.workers * (work.cluster > 1 ? kRowTile : 1);
    for (int i = threadIdx.x; i < counters; i += kPlanThreads) work.arrivals[i] = 0;
    if (threadIdx.x == 0) shared.most_blocks = 0;
    if (threadIdx.x < kMlaMaxWorkers / 32) shared.begins[threadIdx.x] = 0;
    Visited own;
    int rounds = 0;
    const Totals totals = for_tiles(params, shared, [&](const Visited& at) {
      own = at;
      ++rounds;
      const int most = __reduce_max_sync(~0u, at.tile.blocks());
      if (threadIdx.x % 32 == 0) atomicMax(&shared.most_blocks, most);
      if (at.exists && at.number < kMlaMaxWorkers) shared.tiles[at.number] = at.tile;
    });
    __syncthreads();
    if (totals.tiles == 0) return;
    const int64_t cost = totals.blocks + static_cast<int64_t>(totals.tiles) * kItemBlocks;
    const int64_t share = quotient(cost + work.workers - 1, int64_t{work.workers});
    const auto balanced = [&](int64_t most, int slack_part) {
      return params.whole_tiles || work.cluster > 1 ||
             most <= share + max(static_cast<int64_t>(kWholeSlack), share / slack_part);
    };
    if (totals.tiles <= work.workers) {
      const int piece = find_piece(params, totals, shared);
      if (balanced(piece + kItemBlocks, kPiecesSlackPart)) {
        plan_pieces(params, totals, piece, shared);
        return;
      }
    }
    // Once more over all tiles: those of a single round are still at hand.
    const auto revisit = [&](auto visit) {
      if (rounds == 1) {
        visit(own);
      } else {
        for_tiles(params, shared, visit);
      }
    };
    const int64_t dealt = quotient(totals.tiles + work.workers - 1, work.workers);
    if (balanced(dealt * (shared.most_blocks + kItemBlocks), kWholeSlackPart)) {
      revisit([&](const Visited& at) { deal_whole(params, at, totals.tiles); });
      return;
    }
    revisit([&](const Visited& at) {
      for_stretches(at, share, [&](int worker, int, int) {
        atomicMin(&shared.begin[worker], at.number + worker);
        atomicMax(&shared.end[worker], at.number + worker + 1);
      });
    });
    __syncthreads();
    revisit([&](const Visited& at) { write_stretches(params, at, share, shared); });
  }

  __device__ static void run(const Params& params) {
    run_plan(params, [&] { plan(params.plan); });
  }
};

template <int kRowTile>
using Config = MlaPlanConfig<kRowTile>;

}  // namespace fovea::kernels::cuda
