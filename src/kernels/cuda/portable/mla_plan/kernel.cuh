// SPDX-License-Identifier: Apache-2.0
// Plans the work of MLA decode from lengths on the device, in one block and without the host. A
// part of a row tile costs writing, reading and merging its accumulators, so tiles are cut only
// where that buys balance:
//
//   pieces  with no more tiles than workers: tile i is cut into ceil(blocks_i / p) equal pieces,
//   one
//           for each worker; p is the smallest of 32 candidates for which the workers suffice
//   whole   with more tiles than workers, where dealing whole tiles in turn costs little
//   line    otherwise: the tiles form a line, and worker w has the stretch
//           [w, w + 1) * total / workers
#pragma once

#include "kernels/cuda/common/division.cuh"
#include "kernels/cuda/common/mla_params.h"
#include "kernels/cuda/common/plan_kernel.cuh"
#include "kernels/cuda/common/scan.cuh"
#include "kernels/cuda/portable/mla_plan/tiles.cuh"

namespace fovea::kernels::cuda {

// Cost of an item besides its keys, in blocks of 64 keys: queries, a first tile without overlap,
// output.
constexpr int kItemBlocks = 2;
// How much more than its share the busiest worker may have: this many blocks, or one part in
// kWholeSlackPart of the share with whole tiles, in kPiecesSlackPart with equal pieces. In a line
// every worker has two parts, and with fewer workers busy the clock is higher (chosen on H200,
// 2026-11-23).
constexpr int kWholeSlack = 4;
constexpr int kWholeSlackPart = 16;
constexpr int kPiecesSlackPart = 4;
// Pieces of 128 rows have at least two blocks if there are more blocks than this, because each part
// makes the merge longer (chosen on H200, 2026-11-22).
constexpr int kFewBlocks = 32;
// Parts of more blocks are left to the merge: in pairs, blocks with the same keys are no cluster
// and get out of step (chosen on H200, 2026-11-23).
constexpr int kMaxPairBlocks = 96;

template <int kRowTile>
struct MlaPlanConfig : MlaTiles<kRowTile> {
  using Tiles = MlaTiles<kRowTile>;
  using Visited = typename Tiles::Visited;
  using Totals = typename Tiles::Totals;
  using Tiles::divided;
  using Params = PlanKernelParams<MlaPlanParams>;
  static constexpr int kBlocksPerSm = 1;
  static_assert(kPlanThreads >= kMlaMaxWorkers);

  // A tile in the line: its blocks (one if it is empty), then kItemBlocks until the next tile. The
  // item of tile t for worker w has number t + w, so that a worker's items are consecutive.
  struct LineTile {
    PlannedTile tile;
    int number;
    int64_t start;
    __device__ int64_t last() const { return start + tile.length() - 1; }
  };

  struct SharedMemory : MlaTiles<kRowTile>::Memory {
    ScanMemory<int64_t> blocks;
    PlannedTile tiles[kMlaMaxWorkers];
    // Entries of workers that have the first piece of a tile, or whose first tile in the line
    // differs from the preceding worker's. These workers' bits in `begins` are set.
    int tile_at[kMlaMaxWorkers], pieces[kMlaMaxWorkers];
    LineTile line[kMlaMaxWorkers];
    unsigned begins[kMlaMaxWorkers / 32];
    int enough[32];  // set for candidates for which the workers suffice
  };
  static constexpr KernelTraits kTraits = {kPlanThreads, sizeof(SharedMemory), kRowTile,
                                           kBlockKeys};

  // Returns whether the attention kernel joins the parts of all row tiles.
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

  // Writes a worker's range. For MlaJoins::pairs blocks form clusters of two: the two blocks of a
  // worker, or with `pairs` blocks of two workers that have the same rows.
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

  // Returns the number of pieces of at most `piece` blocks. In clusters it is a power of two or a
  // number of whole clusters, because in a partly used cluster each block joins more rows.
  __device__ static int pieces_of(const MlaPlanParams& params, int blocks, int piece) {
    const int cluster = cluster_workers(params);
    const int count = max(divided(blocks + piece - 1, piece), 1);
    return count < cluster ? 1 << (32 - __clz(count - 1)) : (count + cluster - 1) & -cluster;
  }
  __device__ static int cluster_workers(const MlaPlanParams& params) {
    return params.joins == MlaJoins::pairs ? kPairWorkers : params.work.cluster;
  }

  // Returns the smallest of 32 candidates for the blocks of a piece, at most `limit`, for which the
  // workers suffice; 0 if there is none. There are no more tiles than workers, all in shared.tiles.
  // If tiles are alike, each warp computes it alone, one candidate a lane, without a barrier.
  __device__ static int find_piece(const MlaPlanParams& params, const Totals& totals, int64_t limit,
                                   SharedMemory& shared) {
    const int64_t workers = params.work.workers;
    const int lane = threadIdx.x % 32;
    const int min_size = max(static_cast<int>(divided(totals.blocks + workers - 1, workers)),
                             kRowTile == 128 && totals.blocks > kFewBlocks ? 2 : 1);
    const auto size = [&](int candidate) {
      return candidate == 31 ? max(totals.max, 1) : min_size + (min_size * candidate + 15) / 16;
    };
    bool enough;  // the workers suffice for this lane's candidate
    if (totals.alike()) {
      enough = totals.tiles * pieces_of(params, totals.max, size(lane)) <= workers;
    } else {
      for (int candidate = threadIdx.x / 32; candidate < 32; candidate += kPlanWarps) {
        if (size(candidate) > limit) continue;
        int pieces = 0;
        for (int i = lane; i < totals.tiles; i += 32) {
          pieces += pieces_of(params, shared.tiles[i].blocks(), size(candidate));
        }
        pieces = __reduce_add_sync(~0u, pieces);
        if (lane == 0) shared.enough[candidate] = pieces <= workers;
      }
      __syncthreads();
      enough = shared.enough[lane];
    }
    const unsigned candidates = __ballot_sync(~0u, enough && size(lane) <= limit);
    return candidates ? size(__ffs(candidates) - 1) : 0;
  }

  __device__ static void mark_begin(SharedMemory& shared, int worker) {
    atomicOr(&shared.begins[worker / 32], 1u << worker % 32);
  }
  // Returns the last marked worker up to `worker`; there is one.
  __device__ static int last_begin(const SharedMemory& shared, int worker) {
    int word = worker / 32;
    unsigned begins = shared.begins[word] & (2u << worker % 32) - 1;
    while (begins == 0) begins = shared.begins[--word];
    return 32 * word + 31 - __clz(begins);
  }

  // A worker's piece of a tile.
  struct Piece {
    int tile;   // -1: the worker has none
    int first;  // first worker of the tile
    int count;  // pieces of the tile
  };
  __device__ static Piece piece_of_worker(const MlaPlanParams& params, const Totals& totals,
                                          int piece, SharedMemory& shared) {
    const int number = threadIdx.x;
    if (totals.alike()) {
      if (number >= params.work.workers) return {-1, 0, 0};
      const int count = pieces_of(params, totals.max, piece);
      const int tile = divided(number, count);
      return {tile < totals.tiles ? tile : -1, tile * count, count};
    }
    const int own =
        number < totals.tiles ? pieces_of(params, shared.tiles[number].blocks(), piece) : 0;
    // Whole clusters come first, then tiles by falling number of pieces, so that no tile crosses
    // two clusters without need. One scan finds the sums for all sizes: tiles of 2^k pieces (or
    // whole clusters of 2^k blocks) are counted in units of 2^k, which fit in 8 - k bits.
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
      mark_begin(shared, begin);
    }
    __syncthreads();
    if (number >= total) return {-1, 0, 0};
    const int first = last_begin(shared, number);
    return {shared.tile_at[first], first, shared.pieces[first]};
  }

  __device__ static void plan_pieces(const MlaPlanParams& params, const Totals& totals, int piece,
                                     SharedMemory& shared) {
    const MlaWorkList& work = params.work;
    const int worker = threadIdx.x;
    const auto [tile_number, first, count] = piece_of_worker(params, totals, piece, shared);
    if (tile_number < 0) return;
    const PlannedTile tile = shared.tiles[tile_number];
    const int n = worker - first;
    const bool pairs = params.joins == MlaJoins::pairs && piece <= kMaxPairBlocks;
    const bool paired = pairs && count == 2;
    const int slot = count == 1          ? -1
                     : in_decode(params) ? parts_of_workers(first, count)
                     : paired            ? kPaired
                                         : slot_of_worker(worker, first);
    const auto from = [&](int part) { return divided(tile.blocks() * part, count); };
    const MlaItem item = item_of(tile, from(n), from(n + 1), slot);
    work.items[worker] = item;
    write_range(params, worker, {worker, worker + 1, 1, 0, item}, pairs);
    if (n == 0 && count > 1 && !paired && !in_decode(params)) {
      work.merges[worker] = merge_of(tile, worker, count);
    }
  }

  // Deals tile i to worker i % workers: neighbouring tiles, which may have the same keys, are
  // computed at the same time, so that the keys are read from memory once.
  __device__ static void deal_whole(const MlaPlanParams& params, const Visited& at, int tiles) {
    if (!at.exists) return;
    const MlaWorkList& work = params.work;
    const MlaItem item = item_of(at.tile, 0, at.tile.blocks(), -1);
    work.items[at.number] = item;
    if (at.number < work.workers) {
      write_range(params, at.number, {at.number, tiles, work.workers, 0, item}, false);
    }
  }

  // Returns the stretch of a tile in the line that `worker` has.
  __device__ static MlaItem stretch_of(const MlaPlanParams& params, const LineTile& at, int worker,
                                       int64_t share) {
    const int first = static_cast<int>(divided(at.start, share));
    const int parts = static_cast<int>(divided(at.last(), share)) - first + 1;
    const int64_t begin = worker * share - at.start;
    return item_of(at.tile, static_cast<int>(max(begin, int64_t{0})),
                   static_cast<int>(min(begin + share, int64_t{at.tile.blocks()})),
                   parts == 1          ? -1
                   : in_decode(params) ? parts_of_workers(first, parts)
                                       : slot_of_worker(worker, first));
  }

  // Places a thread's tile: writes its first stretch and marks the first worker that begins with
  // it.
  __device__ static void place_tile(const MlaPlanParams& params, const LineTile& at, int64_t share,
                                    SharedMemory& shared) {
    const MlaWorkList& work = params.work;
    const int first = static_cast<int>(divided(at.start, share));
    const int last = static_cast<int>(divided(at.last(), share));
    work.items[at.number + first] = stretch_of(params, at, first, share);
    if (last > first && !in_decode(params)) {
      work.merges[first] = merge_of(at.tile, first, last - first + 1);
    }
    // After the workers that begin with an earlier tile.
    const int begin =
        at.number == 0 ? 0 : static_cast<int>(divided(at.start - kItemBlocks - 1, share)) + 1;
    if (begin > last) return;
    shared.line[begin] = at;
    mark_begin(shared, begin);
  }

  // Places a thread's worker: writes its range, and its first item if that is not the first stretch
  // of a tile. `end` is the end of the line's last tile.
  __device__ static void place_worker(const MlaPlanParams& params, int tiles, int64_t end,
                                      int64_t share, const SharedMemory& shared) {
    const int worker = threadIdx.x;
    const int used = static_cast<int>(divided(end - 1, share)) + 1;
    if (worker >= used) return;
    const LineTile& at = shared.line[last_begin(shared, worker)];
    int tile_end = tiles;
    if (worker + 1 < used) {
      const LineTile& next = shared.line[last_begin(shared, worker + 1)];
      tile_end = next.number + (next.start < (worker + 1) * share ? 1 : 0);
    }
    if (at.number >= tile_end) return;
    const MlaItem item = stretch_of(params, at, worker, share);
    if (at.start < worker * share) params.work.items[at.number + worker] = item;
    write_range(params, worker, {at.number + worker, tile_end + worker, 1, 0, item}, false);
  }

  __device__ static void clear_list(const MlaPlanParams& params, SharedMemory& shared) {
    const MlaWorkList& work = params.work;
    for (int worker = threadIdx.x; worker < work.workers; worker += kPlanThreads) {
      write_range(params, worker, {}, false);
      work.merges[worker].count = 0;
    }
    const int counters = work.workers * (work.cluster > 1 ? kRowTile : 1);
    for (int i = threadIdx.x; i < counters; i += kPlanThreads) work.arrivals[i] = 0;
    if (threadIdx.x < kMlaMaxWorkers / 32) shared.begins[threadIdx.x] = 0;
  }

  __device__ static void plan(const MlaPlanParams& params) {
    extern __shared__ __align__(16) char dynamic_shared[];
    auto& shared = *reinterpret_cast<SharedMemory*>(dynamic_shared);
    const MlaWorkList& work = params.work;
    // Lengths are loaded while the list is cleared.
    const RequestView view = Tiles::view_of(params, static_cast<int>(threadIdx.x));
    clear_list(params, shared);
    Visited own;
    int rounds = 0;
    int64_t own_blocks = 0;
    int own_max = 0;
    int own_min = 0x7fffffff;
    const int tiles = Tiles::for_tiles(params, view, shared, [&](const Visited& at) {
      own = at;
      ++rounds;
      if (!at.exists) return;
      const int blocks = at.tile.blocks();
      own_blocks += at.tile.length();
      own_max = max(own_max, blocks);
      own_min = min(own_min, blocks);
      if (at.number < kMlaMaxWorkers) shared.tiles[at.number] = at.tile;
    });
    if (tiles == 0) return;
    const Totals totals = Tiles::totals_of(tiles, own_blocks, own_max, own_min, shared);
    const int64_t cost = totals.blocks + static_cast<int64_t>(totals.tiles) * kItemBlocks;
    const int64_t share = divided(cost + work.workers - 1, int64_t{work.workers});
    // The largest cost that the busiest worker may have.
    const bool any_balance = params.whole_tiles || work.cluster > 1;
    const auto limit = [&](int slack_part) {
      if (any_balance) return int64_t{1} << 62;
      return share + max(int64_t{kWholeSlack}, divided(share, int64_t{slack_part}));
    };
    if (totals.tiles <= work.workers) {
      const int piece =
          params.whole_tiles
              ? max(totals.max, 1)
              : find_piece(params, totals, limit(kPiecesSlackPart) - kItemBlocks, shared);
      if (piece > 0) {
        plan_pieces(params, totals, piece, shared);
        return;
      }
    }
    // Visits all tiles again. After a single round they are still in registers.
    const auto revisit = [&](auto visit) {
      if (rounds == 1) {
        visit(own);
      } else {
        Tiles::for_tiles(params, Tiles::view_of(params, static_cast<int>(threadIdx.x)), shared,
                         visit);
      }
    };
    const int64_t dealt = divided(totals.tiles + work.workers - 1, work.workers);
    if (dealt * (totals.max + kItemBlocks) <= limit(kWholeSlackPart)) {
      revisit([&](const Visited& at) { deal_whole(params, at, totals.tiles); });
      return;
    }
    int64_t end = 0;  // end of the line of earlier rounds
    revisit([&](const Visited& at) {
      const int length = at.exists ? at.tile.length() + kItemBlocks : 0;
      int64_t sum;
      const int64_t start = end + exclusive_scan(int64_t{length}, sum, shared.blocks);
      if (at.exists) place_tile(params, {at.tile, at.number, start}, share, shared);
      end += sum;
    });
    __syncthreads();
    place_worker(params, totals.tiles, end - kItemBlocks, share, shared);
  }

  __device__ static void run(const Params& params) {
    run_plan(params, [&] { plan(params.plan); });
  }
};

template <int kRowTile>
using Config = MlaPlanConfig<kRowTile>;

}  // namespace fovea::kernels::cuda
