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

  struct SharedMemory : MlaTiles<kRowTile>::Memory {
    ScanMemory<int64_t> blocks;
    PlannedTile tiles[kMlaMaxWorkers];
    // Of workers that have the first piece of a tile, one bit each in begins.
    int tile_at[kMlaMaxWorkers], pieces[kMlaMaxWorkers];
    unsigned begins[kMlaMaxWorkers / 32];
    int enough[32];                                  // candidates for which the workers suffice
    int begin[kMlaMaxWorkers], end[kMlaMaxWorkers];  // of the workers' ranges
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

  // The least blocks of a piece for which the workers suffice; no more tiles than workers, all in
  // shared.tiles. Where tiles are alike, each warp for itself, a candidate a lane: no barrier.
  __device__ static int find_piece(const MlaPlanParams& params, const Totals& totals,
                                   SharedMemory& shared) {
    const MlaWorkList& work = params.work;
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int least = max(static_cast<int>(divided(totals.blocks + work.workers - 1, work.workers)),
                          kRowTile == 128 && totals.blocks > kFewBlocks ? 2 : 1);
    const auto size = [&](int candidate) {
      return candidate == 31 ? max(totals.most, 1) : least + (least * candidate + 15) / 16;
    };
    if (totals.alike()) {
      const int all = totals.tiles * pieces_of(params, totals.most, size(lane));
      return size(params.whole_tiles ? 31 : __ffs(__ballot_sync(~0u, all <= work.workers)) - 1);
    }
    int pieces = 0;
    for (int i = lane; i < totals.tiles; i += 32) {
      pieces += pieces_of(params, shared.tiles[i].blocks(), size(warp));
    }
    pieces = __reduce_add_sync(~0u, pieces);
    if (lane == 0) shared.enough[warp] = pieces <= work.workers;
    __syncthreads();
    return size(params.whole_tiles ? 31 : __ffs(__ballot_sync(~0u, shared.enough[lane])) - 1);
  }

  // Where a worker's piece is.
  struct Piece {
    int tile;   // -1: nowhere
    int first;  // worker of the tile
    int count;  // of the tile
  };
  __device__ static Piece piece_of_worker(const MlaPlanParams& params, const Totals& totals,
                                          int piece, SharedMemory& shared) {
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
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
      atomicOr(&shared.begins[begin / 32], 1u << begin % 32);
    }
    __syncthreads();
    if (number >= total) return {-1, 0, 0};
    int word = warp;
    unsigned begins = shared.begins[word] & (2u << lane) - 1;
    while (begins == 0) begins = shared.begins[--word];
    const int first = 32 * word + 31 - __clz(begins);
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
    // Lengths are on their way while the list is cleared.
    const RequestView view = Tiles::view_of(params, static_cast<int>(threadIdx.x));
    for (int worker = threadIdx.x; worker < work.workers; worker += kPlanThreads) {
      write_range(params, worker, {}, false);
      work.merges[worker].count = 0;
      shared.begin[worker] = 0x7fffffff;
      shared.end[worker] = 0;
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
      own_blocks += blocks;
      own_most = max(own_most, blocks);
      own_least = min(own_least, blocks);
      if (at.number < kMlaMaxWorkers) shared.tiles[at.number] = at.tile;
    });
    if (tiles == 0) return;
    const Totals totals = Tiles::totals_of(tiles, own_blocks, own_most, own_least, shared);
    const int64_t cost = totals.blocks + static_cast<int64_t>(totals.tiles) * kItemBlocks;
    const int64_t share = divided(cost + work.workers - 1, work.workers);
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
        Tiles::for_tiles(params, Tiles::view_of(params, static_cast<int>(threadIdx.x)), shared,
                         visit);
      }
    };
    const int64_t dealt = divided(totals.tiles + work.workers - 1, work.workers);
    if (balanced(dealt * (totals.most + kItemBlocks), kWholeSlackPart)) {
      revisit([&](const Visited& at) { deal_whole(params, at, totals.tiles); });
      return;
    }
    int64_t passed = 0;  // blocks of the rounds before
    const auto place = [&](Visited& at) {
      int64_t sum;
      at.before =
          passed + exclusive_scan(static_cast<int64_t>(at.tile.blocks()), sum, shared.blocks);
      passed += sum;
    };
    if (rounds == 1) place(own);
    const auto in_line = [&](auto visit) {
      passed = 0;
      revisit([&](Visited at) {
        if (rounds > 1) place(at);
        visit(at);
      });
    };
    in_line([&](const Visited& at) {
      for_stretches(at, share, [&](int worker, int, int) {
        atomicMin(&shared.begin[worker], at.number + worker);
        atomicMax(&shared.end[worker], at.number + worker + 1);
      });
    });
    __syncthreads();
    in_line([&](const Visited& at) { write_stretches(params, at, share, shared); });
  }

  __device__ static void run(const Params& params) {
    run_plan(params, [&] { plan(params.plan); });
  }
};

template <int kRowTile>
using Config = MlaPlanConfig<kRowTile>;

}  // namespace fovea::kernels::cuda
