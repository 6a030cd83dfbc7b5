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
#include "kernels/cuda/portable/mla_plan/tiles.cuh"

namespace fovea::kernels::cuda {

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

template <int kRowTile>
struct MlaPlanConfig : MlaTiles<kRowTile> {
  using Tiles = MlaTiles<kRowTile>;
  using Visited = typename Tiles::Visited;
  using Totals = typename Tiles::Totals;
  using Tiles::divided;
  using Params = PlanLaunch<MlaPlanParams>;
  static constexpr int kBlocksPerSm = 1;
  static_assert(kPlanThreads >= kMlaMaxWorkers);

  // A tile in the line: its blocks, an empty tile's one, then kItemBlocks until the next. Its item
  // of a worker is number tile + worker, so the items of a worker stand in a row.
  struct LineTile {
    PlannedTile tile;
    int number;
    int64_t start;
    __device__ int64_t last() const { return start + tile.length() - 1; }
  };

  struct SharedMemory : MlaTiles<kRowTile>::Memory {
    ScanMemory<int64_t> blocks;
    PlannedTile tiles[kMlaMaxWorkers];
    // Of workers that have the first piece of a tile, or whose first tile in the line is not that
    // of the worker before: one bit each in begins.
    int tile_at[kMlaMaxWorkers], pieces[kMlaMaxWorkers];
    LineTile line[kMlaMaxWorkers];
    unsigned begins[kMlaMaxWorkers / 32];
    int enough[32];  // candidates for which the workers suffice
  };
  static constexpr KernelTraits kTraits = {kPlanThreads, sizeof(SharedMemory), kRowTile,
                                           kBlockKeys};

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
  __device__ static int pieces_of(const MlaPlanParams& params, int blocks, int piece) {
    const int cluster = cluster_workers(params);
    const int count = max(divided(blocks + piece - 1, piece), 1);
    return count < cluster ? 1 << (32 - __clz(count - 1)) : (count + cluster - 1) & -cluster;
  }
  __device__ static int cluster_workers(const MlaPlanParams& params) {
    return params.joins == MlaJoins::pairs ? kPairWorkers : params.work.cluster;
  }

  // The least blocks of a piece for which the workers suffice, of 32 candidates of at most `limit`;
  // 0: none does. No more tiles than workers, all in shared.tiles. Where tiles are alike, each warp
  // for itself, a candidate a lane: no barrier.
  __device__ static int find_piece(const MlaPlanParams& params, const Totals& totals, int64_t limit,
                                   SharedMemory& shared) {
    const int64_t workers = params.work.workers;
    const int lane = threadIdx.x % 32;
    const int least = max(static_cast<int>(divided(totals.blocks + workers - 1, workers)),
                          kRowTile == 128 && totals.blocks > kFewBlocks ? 2 : 1);
    const auto size = [&](int candidate) {
      return candidate == 31 ? max(totals.most, 1) : least + (least * candidate + 15) / 16;
    };
    bool enough;  // the workers for this lane's candidate
    if (totals.alike()) {
      enough = totals.tiles * pieces_of(params, totals.most, size(lane)) <= workers;
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
  // The last marked worker that is not behind `worker`; there is one.
  __device__ static int last_begin(const SharedMemory& shared, int worker) {
    int word = worker / 32;
    unsigned begins = shared.begins[word] & (2u << worker % 32) - 1;
    while (begins == 0) begins = shared.begins[--word];
    return 32 * word + 31 - __clz(begins);
  }

  // Where a worker's piece is.
  struct Piece {
    int tile;   // -1: nowhere
    int first;  // worker of the tile
    int count;  // of the tile
  };
  __device__ static Piece piece_of_worker(const MlaPlanParams& params, const Totals& totals,
                                          int piece, SharedMemory& shared) {
    const int number = threadIdx.x;
    if (totals.alike()) {
      if (number >= params.work.workers) return {-1, 0, 0};
      const int count = pieces_of(params, totals.most, piece);
      const int tile = divided(number, count);
      return {tile < totals.tiles ? tile : -1, tile * count, count};
    }
    const int own =
        number < totals.tiles ? pieces_of(params, shared.tiles[number].blocks(), piece) : 0;
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

  // What `worker` has of a tile in the line.
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

  // A thread's tile: its first stretch, and which workers begin with it.
  __device__ static void place_tile(const MlaPlanParams& params, const LineTile& at, int64_t share,
                                    SharedMemory& shared) {
    const MlaWorkList& work = params.work;
    const int first = static_cast<int>(divided(at.start, share));
    const int last = static_cast<int>(divided(at.last(), share));
    work.items[at.number + first] = stretch_of(params, at, first, share);
    if (last > first && !in_decode(params)) {
      work.merges[first] = merge_of(at.tile, first, last - first + 1);
    }
    // Behind those that begin with a tile ahead.
    const int begin =
        at.number == 0 ? 0 : static_cast<int>(divided(at.start - kItemBlocks - 1, share)) + 1;
    if (begin > last) return;
    shared.line[begin] = at;
    mark_begin(shared, begin);
  }

  // A thread's worker: its range, and its first item where that is not a tile's first stretch.
  // `end` of the line, without what comes behind its last tile.
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

  __device__ static void plan(const MlaPlanParams& params) {
    extern __shared__ __align__(16) char dynamic_shared[];
    auto& shared = *reinterpret_cast<SharedMemory*>(dynamic_shared);
    const MlaWorkList& work = params.work;
    // Lengths are on their way while the list is cleared.
    const RequestView view = Tiles::view_of(params, static_cast<int>(threadIdx.x));
    for (int worker = threadIdx.x; worker < work.workers; worker += kPlanThreads) {
      write_range(params, worker, {}, false);
      work.merges[worker].count = 0;
    }
    const int counters = work.workers * (work.cluster > 1 ? kRowTile : 1);
    for (int i = threadIdx.x; i < counters; i += kPlanThreads) work.arrivals[i] = 0;
    if (threadIdx.x < kMlaMaxWorkers / 32) shared.begins[threadIdx.x] = 0;
    Visited own;
    int rounds = 0;
    int64_t own_blocks = 0;
    int own_most = 0;
    int own_least = 0x7fffffff;
    const int tiles = Tiles::for_tiles(params, view, shared, [&](const Visited& at) {
      own = at;
      ++rounds;
      if (!at.exists) return;
      const int blocks = at.tile.blocks();
      own_blocks += at.tile.length();
      own_most = max(own_most, blocks);
      own_least = min(own_least, blocks);
      if (at.number < kMlaMaxWorkers) shared.tiles[at.number] = at.tile;
    });
    if (tiles == 0) return;
    const Totals totals = Tiles::totals_of(tiles, own_blocks, own_most, own_least, shared);
    const int64_t cost = totals.blocks + static_cast<int64_t>(totals.tiles) * kItemBlocks;
    const int64_t share = divided(cost + work.workers - 1, int64_t{work.workers});
    // What the busiest worker may have.
    const bool any_balance = params.whole_tiles || work.cluster > 1;
    const auto limit = [&](int slack_part) {
      if (any_balance) return int64_t{1} << 62;
      return share + max(int64_t{kWholeSlack}, divided(share, int64_t{slack_part}));
    };
    if (totals.tiles <= work.workers) {
      const int piece =
          params.whole_tiles
              ? max(totals.most, 1)
              : find_piece(params, totals, limit(kPiecesSlackPart) - kItemBlocks, shared);
      if (piece > 0) {
        plan_pieces(params, totals, piece, shared);
        return;
      }
    }
    // Once more over all tiles: those of a single round are still at hand.
    const auto revisit = [&](auto visit) {
      if (rounds == 1) {
        visit(own);
      } else {
        Tiles::for_tiles(params, Tiles::view_of(params, static_cast<int>(threadIdx.x)), shared,
                         visit);
      }
    };
    const int64_t dealt = divided(totals.tiles + work.workers - 1, work.workers);
    if (dealt * (totals.most + kItemBlocks) <= limit(kWholeSlackPart)) {
      revisit([&](const Visited& at) { deal_whole(params, at, totals.tiles); });
      return;
    }
    int64_t end = 0;  // of the line of the rounds before
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
