// SPDX-License-Identifier: Apache-2.0
// From device-side lengths to the work list, without the host. Every (row tile, group of kv heads)
// pair costs its keys, counted in units of kGrain, plus kOverhead; the pairs stand in a line, which
// is cut into equal ranges, one for each CTA of the attention kernel. Everything about a pair follows
// from where it begins in the line, so each thread writes its pairs on its own.
//
//   pairs    |---- 0 ----|-- 1 --|-------- 2 --------|-- 3 --|
//   ranges   |    0    |    1    |    2    |    3    |   4   |     item of (pair, range): index pair + range
#pragma once

#include "kernels/cuda/common/decode_params.h"
#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/common/scan.cuh"
#include "kernels/cuda/common/visibility.cuh"

namespace fovea::kernels::cuda {

constexpr int kPlanThreads = 1024;
constexpr int kMaxRanges = 2048;

// A row tile and, once they are known, where its pairs begin in the line of one head.
template <int kOverhead>
struct TileOfPlan {
  RequestView view;
  int first_row;
  int first_key;  // the first any row sees; cuts are counted from the block of kGrain it lies in
  int end_key;
  int units;
  int64_t start;
  __device__ int cost() const { return units + kOverhead; }
};

template <int kRowTile, int kGrain, int kOverhead>
struct PlanConfig {
  using Params = DecodePlanParams;
  using PlannedTile = TileOfPlan<kOverhead>;
  static constexpr int kBlocksPerSm = 1;

  struct SharedMemory {
    ScanMemory<int> small_scan;
    ScanMemory<int64_t> scan;
    // Of 1024 requests at a time.
    RequestView views[kPlanThreads];
    int tile_begin[kPlanThreads];
    // Of 1024 tiles at a time.
    PlannedTile tiles[kPlanThreads];
    int64_t bounds[kMaxRanges + 1];
    unsigned long long other_pairs;  // (query token, key) pairs of the kernel beside
  };
  static constexpr KernelTraits kTraits = {kPlanThreads, sizeof(SharedMemory), kRowTile, kGrain};

  // (query token, key) pairs of a request, about.
  __device__ static unsigned long long pairs_of(const BatchParams& batch, int request) {
    const RequestView view = request_view(batch, request);
    const Interval keys = visible_keys(batch.mask, view, view.q_len / 2, view.q_len / 2);
    return static_cast<unsigned long long>(view.q_len) * (keys.end - keys.begin);
  }

  // CTAs for `units` of work. They and the kernel beside end together if it has the rest.
  __device__ static int fitting_ctas(const Params& params, int64_t units, unsigned long long other_pairs) {
    const int all = params.list.ctas;
    if (other_pairs == 0) return all;
    const float beside = static_cast<float>(other_pairs) / (params.pairs_per_unit * static_cast<float>(units));
    return min(max(static_cast<int>((1 - beside) * static_cast<float>(all)), params.least_ctas), all);
  }

  // Views and first tiles of the requests from `first` on; returns how many tiles they have.
  __device__ static int load_requests(const Params& params, int first, SharedMemory& shared) {
    const int request = first + static_cast<int>(threadIdx.x);
    const int group = params.batch.q_heads / params.batch.kv_heads;
    RequestView view = {request, 0, 0, 0};
    if (request < params.batch.requests) {
      view = planned_view(params.batch, request);
      if (params.batch.most_q_len > 0 && view.q_len == 0) {
        atomicAdd(&shared.other_pairs, pairs_of(params.batch, request));
      }
    }
    int total;
    const int tiles = (view.q_len * group + kRowTile - 1) / kRowTile;
    const int before = exclusive_scan(tiles, total, shared.small_scan);
    shared.views[threadIdx.x] = view;
    shared.tile_begin[threadIdx.x] = before;
    __syncthreads();
    return total;
  }

  __device__ static PlannedTile find_tile(const Params& params, int first, int tile,
                                          const SharedMemory& shared) {
    // The last request whose first tile is not after this one; with one tile each, number `tile`.
    const int requests = min(kPlanThreads, params.batch.requests - first);
    int low = 0;
    int high = requests;
    if (tile < requests && shared.tile_begin[tile] == tile &&
        (tile + 1 == requests || shared.tile_begin[tile + 1] > tile)) {
      low = tile;
      high = tile + 1;
    }
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (shared.tile_begin[middle] <= tile ? low : high) = middle;
    }
    const RequestView view = shared.views[low];
    const int group = params.batch.q_heads / params.batch.kv_heads;
    PlannedTile planned;
    planned.view = view;
    planned.first_row = (tile - shared.tile_begin[low]) * kRowTile;
    const int last_row = min(planned.first_row + kRowTile, view.q_len * group) - 1;
    const Interval keys =
        visible_keys(params.batch.mask, view, planned.first_row / group, last_row / group);
    planned.first_key = keys.begin;
    planned.end_key = keys.end;
    // At least one, so that every pair has a place of its own in the line.
    planned.units = max((keys.end + kGrain - 1) / kGrain - keys.begin / kGrain, 1);
    planned.start = 0;
    return planned;
  }

  // The cut line. Reads of it are shared memory.
  struct Line {
    const int64_t* bounds;
    int ranges;
    float ranges_per_unit;
    int groups;  // of heads
    int heads;   // of a group
    int64_t pairs;
    bool in_clusters;

    // The range that holds this place: a guess, put right.
    __device__ int range_at(int64_t place) const {
      int range = min(static_cast<int>(static_cast<float>(place) * ranges_per_unit), ranges - 1);
      while (bounds[range] > place) --range;
      while (bounds[range + 1] <= place) ++range;
      return range;
    }
  };

  // The pair (tile, head) and its ranges.
  struct Pair {
    const PlannedTile& tile;
    int head;
    int number;
    int64_t start;
    int first_range, last_range;
  };

  __device__ static Pair find_pair(const Line& line, const PlannedTile& tile, int head, int64_t tile_number) {
    const int64_t start = tile.start * line.groups + static_cast<int64_t>(head) * tile.cost();
    Pair pair = {tile, head, static_cast<int>(tile_number * line.groups + head), start, 0, 0};
    pair.first_range = line.range_at(start);
    pair.last_range = pair.first_range;
    if (line.bounds[pair.first_range + 1] < start + tile.units) {
      pair.last_range = line.range_at(start + tile.units - 1);
    }
    return pair;
  }

  // The part of a pair in one range, and what the range's entries learn from it.
  __device__ static void write_part(const DecodeWork& work, const Line& line, const Pair& pair, int range) {
    const PlannedTile& tile = pair.tile;
    const int first_unit = tile.first_key / kGrain;
    const int parts = pair.last_range - pair.first_range + 1;
    const int first_part = 2 * pair.first_range + 1;
    const auto key_at = [&](int bound) {
      return (first_unit + static_cast<int>(line.bounds[bound] - pair.start)) * kGrain;
    };
    DecodeItem item = {tile.view.request,
                     pair.head * line.heads,
                     tile.first_row,
                     range == pair.first_range ? tile.first_key : key_at(range),
                     range == pair.last_range ? tile.end_key : key_at(range + 1),
                     parts == 1                  ? -1
                     : range == pair.first_range ? first_part
                                                 : 2 * range,
                     first_part,
                     parts,
                     tile.view.q_begin,
                     tile.view.q_len,
                     tile.view.kv_len,
                     line.heads};
    const int at = pair.number + range;
    work.items[at] = item;
    // The last unit of the pair before lies kOverhead + 1 before this pair.
    if (range > pair.first_range || line.bounds[range] >= pair.start - kOverhead) {
      work.ranges[range].begin = at;
      work.ranges[range].in_cluster = line.in_clusters;
      work.ranges[range].first = item;
    }
    const int64_t next = pair.start + tile.cost();
    const bool is_last = pair.number == line.pairs - 1;
    if (range < pair.last_range || is_last || line.bounds[range + 1] <= next) {
      work.ranges[range].end = at + 1;
    }
  }

  __device__ static void write_empty(const DecodeWork& work, int range) {
    work.ranges[range].begin = work.ranges[range].end = 0;
  }

  // First and last part of a pair, and the ranges that its overhead swallowed.
  __device__ static void write_ends(const DecodeWork& work, const Line& line, const Pair& pair) {
    write_part(work, line, pair, pair.first_range);
    if (pair.last_range > pair.first_range) write_part(work, line, pair, pair.last_range);
    const int64_t next = pair.start + pair.tile.cost();
    const bool is_last = pair.number == line.pairs - 1;
    for (int range = pair.last_range + 1; range < line.ranges; ++range) {
      if (!is_last && line.bounds[range + 1] > next) break;
      write_empty(work, range);
    }
  }

  // A range that holds nothing but keys from the middle of a pair, one of tiles[0, count).
  __device__ static void write_middle(const DecodeWork& work, const Line& line, int range,
                                      const PlannedTile* tiles, int count, int64_t tile_number) {
    const int64_t place = line.bounds[range];
    int low = 0;
    int high = count;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (tiles[middle].start * line.groups <= place ? low : high) = middle;
    }
    const PlannedTile& tile = tiles[low];
    const int64_t inside = place - tile.start * line.groups;
    if (inside < 0 || inside >= static_cast<int64_t>(line.groups) * tile.cost()) return;  // of other tiles
    const Pair pair = find_pair(line, tile, static_cast<int>(inside / tile.cost()), tile_number + low);
    if (pair.first_range < range && range < pair.last_range) write_part(work, line, pair, range);
  }

  // Where all tiles are alike, cuts at their ends save parts to be joined: a few percent of the CTAs are
  // worth that.
  __device__ static int range_count(const DecodeWork& work, int ctas, int pairs, int64_t line) {
    if (pairs == 0) return 0;
    const int rounds = (pairs + ctas - 1) / ctas;
    // How many CTAs have least_units; division of 64 bits would take half a microsecond here.
    const float fed = static_cast<float>(line) / static_cast<float>(work.least_units);
    const int useful = max(static_cast<int>(fminf(fed, static_cast<float>(ctas))), 1);
    const int whole = rounds > 1 ? (pairs + rounds - 1) / rounds : pairs * max(useful / pairs, 1);
    return 4 * whole >= 3 * useful ? whole : useful;
  }

  __device__ static void run(const Params& params) {
    extern __shared__ __align__(16) char dynamic_shared[];
    auto& shared = *reinterpret_cast<SharedMemory*>(dynamic_shared);
    const DecodeWork& work = params.list;
    const int thread = static_cast<int>(threadIdx.x);
    // Behind page_table, which waited for everything itself, there is nothing to wait for but its end.
    if (!params.batch.kv_lens || params.batch.mask.first_keys) wait_for_previous_kernel();
    // How long is the line?
    if (thread == 0) shared.other_pairs = 0;
    __syncthreads();
    int64_t line = 0;
    int64_t all_tiles = 0;
    int last_total = 0;
    for (int first = 0; first < params.batch.requests; first += kPlanThreads) {
      const int tiles = load_requests(params, first, shared);
      last_total = tiles;
      all_tiles += tiles;
      int64_t own = 0;
      for (int tile = thread; tile < tiles; tile += kPlanThreads) {
        const PlannedTile planned = find_tile(params, first, tile, shared);
        if (tiles <= kPlanThreads) shared.tiles[tile] = planned;
        own += planned.cost();
      }
      int64_t total;
      const int64_t before = exclusive_scan(own, total, shared.scan);
      if (tiles <= kPlanThreads && thread < tiles) shared.tiles[thread].start = before;
      line += total;
    }
    const int ctas = fitting_ctas(params, line * params.batch.kv_heads, shared.other_pairs);
    // As many heads an item as leave no CTA without one: tokens are then read in longer runs.
    int heads = 1;
    while (heads < work.max_heads && all_tiles * (params.batch.kv_heads / heads) > ctas) heads *= 2;
    const int groups = params.batch.kv_heads / heads;
    line *= groups;
    const int pairs = static_cast<int>(all_tiles) * groups;
    const bool kept = params.batch.requests <= kPlanThreads && last_total <= kPlanThreads;
    int ranges = range_count(work, ctas, pairs, line);
    // Tiles of about the same length: all get as many parts, which a cluster joins, if it takes enough CTAs.
    int parts = 1;
    while (2 * parts <= work.cluster && 2 * parts * pairs <= ranges) parts *= 2;
    if (4 * parts * pairs < 3 * ranges) parts = 1;
    const bool longer = kept && thread < last_total &&
                        4ll * shared.tiles[thread].cost() * pairs > 5 * line;
    const bool in_clusters = !__syncthreads_or(longer) && kept && parts > 1;
    if (in_clusters) {
      ranges = parts * pairs;
      for (int i = thread; i <= ranges; i += kPlanThreads) {
        const int pair = min(i, ranges - 1) / parts;
        const PlannedTile& tile = shared.tiles[pair / groups];
        shared.bounds[i] =
            tile.start * groups + pair % groups * tile.cost() + (i - pair * parts) * tile.cost() / parts;
      }
    } else {
      for (int i = thread; i <= ranges; i += kPlanThreads) shared.bounds[i] = ranges ? i * line / ranges : 0;
    }
    if (blockIdx.x == 0) {
      for (int i = thread; i < 2 * ranges; i += kPlanThreads) work.tickets[i] = 0;
      for (int i = ranges + thread; i < work.ctas; i += kPlanThreads) write_empty(work, i);
    }
    __syncthreads();

    const Line cut_line = {shared.bounds, ranges, static_cast<float>(ranges) / static_cast<float>(line),
                           groups,        heads,  pairs, in_clusters};
    int64_t base = 0;       // place of the tiles at hand
    int64_t tile_base = 0;  // number of the first of them
    for (int first = 0; first < params.batch.requests; first += kPlanThreads) {
      const int tiles = kept ? last_total : load_requests(params, first, shared);
      for (int at = 0; at < tiles; at += kPlanThreads) {
        const int count = min(kPlanThreads, tiles - at);
        if (!kept) {
          PlannedTile planned = {};
          if (thread < count) planned = find_tile(params, first, at + thread, shared);
          const int64_t own = thread < count ? planned.cost() : 0;
          int64_t total;
          planned.start = base + exclusive_scan(own, total, shared.scan);
          base += total;
          __syncthreads();
          if (thread < count) shared.tiles[thread] = planned;
          __syncthreads();
        }
        const int step = kPlanThreads * gridDim.x;
        const int rank = thread + static_cast<int>(blockIdx.x) * kPlanThreads;
        for (int i = rank; i < count * groups + ranges; i += step) {
          if (i < count * groups) {
            write_ends(work, cut_line,
                       find_pair(cut_line, shared.tiles[i / groups], i % groups, tile_base + i / groups));
          } else {
            write_middle(work, cut_line, i - count * groups, shared.tiles, count, tile_base);
          }
        }
        tile_base += count;
      }
    }
    wait_for_previous_kernel();
  }
};

template <int kRowTile, int kGrain, int kOverhead>
using Config = PlanConfig<kRowTile, kGrain, kOverhead>;

}  // namespace fovea::kernels::cuda
