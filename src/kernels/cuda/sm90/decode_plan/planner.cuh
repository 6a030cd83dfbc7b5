// SPDX-License-Identifier: Apache-2.0
// Turns lengths on the device into decode's work list, without the host. A pair of a row tile and a
// group of kv heads costs its keys, in units of kGrain, plus kOverhead. All pairs stand in a line,
// which is cut into equal ranges, one for each CTA of the attention kernel. If all tiles are about
// equally long, each pair is cut into the same number of equal parts instead. A pair's place in the
// line decides everything about it, so every thread writes its own pairs without the others.
//
//   pairs    |---- 0 ----|-- 1 --|-------- 2 --------|-- 3 --|
//   ranges   |    0    |    1    |    2    |    3    |   4   |   index of an item: pair + range
#pragma once

#include "kernels/cuda/common/plan_kernel.cuh"
#include "kernels/cuda/common/scan.cuh"
#include "kernels/cuda/sm90/decode_plan/line.cuh"

namespace fovea::kernels::cuda {

constexpr int kMaxRanges = 1024;
constexpr int kPlanTiles = 1024;  // tiles in shared memory at a time
// A concurrent kernel for groups whose work is below this fraction of decode's gets no CTAs of its
// own (chosen on H200, 2026-11-23: 12 to 14 % faster).
constexpr float kMinConcurrentShare = 0.125f;

// Decode has the device alone, or another kernel works on other requests of the batch, or
// on groups of these, at the same time.
enum class PlannedRole { alone, concurrent };

template <int kRowTile, int kGrain, int kOverhead, PlannedRole kRole>
struct DecodePlanner {
  using Params = PlanKernelParams<DecodePlanParams>;
  using PlannedTile = TileOfPlan<kOverhead>;
  static constexpr int kBlocksPerSm = 1;

  struct SharedMemory {
    WarpTotals<int64_t, kPlanThreads> scan;
    float concurrent_pairs[kPlanThreads / 32];
    PlannedTile tiles[kPlanTiles];
    int64_t bounds[kMaxRanges + 1];
  };
  static constexpr KernelTraits kTraits = {kPlanThreads, sizeof(SharedMemory), kRowTile, kGrain};

  // Tiles and their cost, which are summed together: below 2^23 and 2^40.
  static constexpr int kCostBits = 40;
  __device__ static int tiles_of(int64_t sum) { return static_cast<int>(sum >> kCostBits); }
  __device__ static int64_t cost_of(int64_t sum) { return sum & ((int64_t{1} << kCostBits) - 1); }

  // Sums over tiles: over those before a thread's requests, or over all.
  struct Place {
    int tiles;
    int64_t cost;
  };

  __device__ static int tile_count(const RequestView& view, int group) {
    return (view.q_len * group + kRowTile - 1) / kRowTile;
  }

  __device__ static PlannedTile tile_of(const BatchParams& batch, const RequestView& view,
                                        int number, int group) {
    PlannedTile planned;
    planned.view = view;
    planned.first_row = number * kRowTile;
    const int end_row = planned.first_row + kRowTile;
    const int first = number == 0 ? 0 : short_quotient(planned.first_row, group);
    const int last =
        end_row >= view.q_len * group ? view.q_len - 1 : short_quotient(end_row - 1, group);
    const Interval keys = visible_keys(batch.mask, view, first, last);
    planned.first_key = keys.begin;
    planned.end_key = keys.end;
    // At least 1, so that every pair has its own place in the line.
    planned.units = max((keys.end + kGrain - 1) / kGrain - keys.begin / kGrain, 1);
    planned.start = 0;
    return planned;
  }

  // Calls visit(tile) for the tiles of a thread's requests, which are `each` neighbours.
  template <typename Visit>
  __device__ __forceinline__ static void for_tiles(const BatchParams& batch, int each, int group,
                                                   Visit visit) {
    const int first = static_cast<int>(threadIdx.x) * each;
#pragma unroll 1
    for (int request = first; request < min(first + each, batch.requests); ++request) {
      const RequestView view = planned_view(batch, request);
      const int tiles = tile_count(view, group);
#pragma unroll 1
      for (int n = 0; n < tiles; ++n) visit(tile_of(batch, view, n, group));
    }
  }

  // Returns the approximate number of (query token, key) pairs of those of a thread's requests that
  // the concurrent kernel serves.
  __device__ static float concurrent_pairs(const BatchParams& batch, int each) {
    float pairs = 0;
    const int first = static_cast<int>(threadIdx.x) * each;
#pragma unroll 1
    for (int request = first; request < min(first + each, batch.requests); ++request) {
      if (planned_view(batch, request).q_len > 0) continue;
      const RequestView view = request_view(batch, request);
      const Interval keys = visible_keys(batch.mask, view, view.q_len / 2, view.q_len / 2);
      pairs += static_cast<float>(view.q_len) * static_cast<float>(keys.end - keys.begin);
    }
    return pairs;
  }

  // Returns the CTAs for `units` of work with which decode and the concurrent kernel, which has the
  // rest, end together.
  __device__ static int fitting_ctas(const DecodePlanParams& params, int64_t units,
                                     float other_pairs) {
    const int all = params.list.ctas;
    if (other_pairs == 0) return all;
    const float share = other_pairs / (params.pairs_per_unit * static_cast<float>(units));
    if (params.batch.max_planned_q_len == 0 && share < kMinConcurrentShare) return all;
    return min(max(static_cast<int>((1 - share) * static_cast<float>(all)), params.min_ctas), all);
  }

  // A pair of a tile and a group of heads, and the ranges it is in.
  struct Pair {
    const PlannedTile& tile;
    int head;
    int number;
    int64_t start;
    int first_range, last_range;
  };

  __device__ static Pair find_pair(const Line& line, const PlannedTile& tile, int head,
                                   int64_t tile_number) {
    const int64_t start = tile.start * line.groups + static_cast<int64_t>(head) * tile.cost();
    Pair pair = {tile, head, static_cast<int>(tile_number * line.groups + head), start, 0, 0};
    pair.first_range = line.range_at(start);
    pair.last_range = pair.first_range;
    if (line.bounds[pair.first_range + 1] < start + tile.units) {
      pair.last_range = line.range_at(start + tile.units - 1);
    }
    return pair;
  }

  // Writes the part of a pair in one range, and the range's own entry if the part begins or ends
  // it.
  __device__ static void write_part(const DecodeWork& work, const Line& line, const Pair& pair,
                                    int range) {
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
      work.ranges[range].cluster_units =
          line.in_cluster ? short_quotient(tile.units + line.parts - 1, line.parts) : 0;
      work.ranges[range].leaves_idle = line.leaves_idle;
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

  // Writes the first part of a pair, and the ranges that lie wholly in its overhead.
  __device__ static void write_first(const DecodeWork& work, const Line& line, const Pair& pair) {
    write_part(work, line, pair, pair.first_range);
    if (pair.number == 0) {
      for (int range = 0; range < pair.first_range; ++range) write_empty(work, range);
    }
    const int64_t next = pair.start + pair.tile.cost();
    const bool is_last = pair.number == line.pairs - 1;
    for (int range = pair.last_range + 1; range < line.ranges; ++range) {
      if (!is_last && line.bounds[range + 1] > next) break;
      write_empty(work, range);
    }
  }

  // Writes the part that a range begins with, if it begins inside a pair of tiles[0, count).
  __device__ static void write_rest(const DecodeWork& work, const Line& line, int range,
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
    const int64_t cost = tile.cost();
    if (inside < 0 || inside >= line.groups * cost) return;  // in another tile
    // A corrected estimate, since a 64-bit division takes longer.
    int head =
        min(static_cast<int>(__fdividef(static_cast<float>(inside), static_cast<float>(cost))),
            line.groups - 1);
    while (head * cost > inside) --head;
    while ((head + 1) * cost <= inside) ++head;
    const Pair pair = find_pair(line, tile, head, tile_number + low);
    if (pair.first_range < range && range <= pair.last_range) write_part(work, line, pair, range);
  }

  // `longest`: cost of the longest of the thread's own tiles. Called by all threads.
  __device__ __forceinline__ static LineCut choose_cut(const DecodePlanParams& params,
                                                       const Place& all, int longest,
                                                       float other_pairs) {
    const DecodeWork& work = params.list;
    const bool kept = all.tiles <= kPlanTiles;
    const int ctas = fitting_ctas(params, all.cost * params.batch.kv_heads, other_pairs);
    LineCut cut;
    // Items take as many heads as leave no CTA without an item: tokens are then read in longer
    // runs.
    cut.heads = 1;
    cut.groups = params.batch.kv_heads;
#pragma unroll 1
    while (cut.heads<work.max_heads&& static_cast<int64_t>(all.tiles) * cut.groups> ctas) {
      cut.heads *= 2;
      cut.groups /= 2;
    }
    const int64_t line = cut.line = all.cost * cut.groups;
    const int pairs = cut.pairs = all.tiles * cut.groups;
    const bool alike = !__syncthreads_or(64ll * longest * pairs > 65 * line) && kept;
    const bool similar = !__syncthreads_or(4ll * longest * pairs > 5 * line) && kept;
    // Cuts at the ends of tiles slow down items of several heads, unless all tiles are alike (not
    // explained; chosen on H200, 2026-11-23: 3 % faster).
    const bool at_ends = alike || cut.heads == 1;
    const int min_ctas = other_pairs > 0 ? params.min_ctas : work.ctas;
    int ranges = range_count(work, ctas, pairs, line, at_ends, min_ctas);
    // Tiles of about the same length all get the same number of parts, which a cluster joins, if
    // that takes enough CTAs or the parts are short.
    int parts = similar && work.cluster > 1
                    ? max(min(work.cluster, short_quotient(ranges, max(pairs, 1))), 1)
                    : 1;
#pragma unroll 1
    while (parts > 1 && short_quotient(work.cluster, parts) * parts != work.cluster) --parts;
    cut.leaves_idle = 4 * parts * pairs < 3 * ranges;
    const bool are_short =
        line - int64_t{kOverhead} * pairs <= int64_t{work.cluster_part_units} * parts * pairs;
    if (cut.leaves_idle && !are_short) parts = 1;
    cut.in_cluster = parts > 1;
    // Without clusters, the CTA of each tile that joins the parts ends last. If parts are short, as
    // many CTAs stay without work, so that those of the next kernel need not wait for it (chosen on
    // H200, 2026-11-22: 5 % faster).
    const bool spares = 8 * pairs <= ctas && line <= 24ll * ctas;
    if (cut.in_cluster) {
      ranges = parts * pairs;
    } else {
      if (spares) ranges = range_count(work, ctas - pairs, pairs, line, at_ends, min_ctas);
      if (alike && !spares && ranges > pairs) {
        const int each = short_quotient(ranges, pairs);
        if (each * pairs == ranges) parts = each;
      }
    }
    cut.ranges = ranges;
    cut.parts = parts;
    cut.whole_pairs = alike && parts == 1 ? whole_pairs_of(pairs, ranges) : 0;
    return cut;
  }

  // Writes the items of the `count` tiles in shared memory, the first of which is tile `at`.
  __device__ __forceinline__ static void write_items(const DecodeWork& work, const Line& line,
                                                     const PlannedTile* tiles, int at, int count,
                                                     int rank, int step) {
#pragma unroll 1
    for (int i = rank; i < count * line.groups; i += step) {
      const int tile = line.groups == 1 ? i : short_quotient(i, line.groups);
      write_first(work, line, find_pair(line, tiles[tile], i - tile * line.groups, at + tile));
    }
    // The last warps, which have no first parts if there are enough warps, write the others.
#pragma unroll 1
    for (int i = step - 1 - rank; i < line.ranges; i += step)
      write_rest(work, line, i, tiles, count, at);
  }

  // Plans the batch by `blocks` blocks, of which this is number `block`. group_pairs: the thread's
  // share of the (query token, key) pairs of groups that a concurrent kernel serves.
  __device__ static void plan(const DecodePlanParams& params, int block, int blocks,
                              float group_pairs, SharedMemory& shared) {
    const BatchParams& batch = params.batch;
    const DecodeWork& work = params.list;
    const int thread = static_cast<int>(threadIdx.x);
    const int group = short_quotient(batch.q_heads, batch.kv_heads);
    const int each = (batch.requests + kPlanThreads - 1) / kPlanThreads;
    PlannedTile own = {};  // the thread's last tile, in a batch of few decodes its only one
    int longest = 0;
    int64_t sum = 0;
    for_tiles(batch, each, group, [&](const PlannedTile& tile) {
      own = tile;
      longest = max(longest, tile.cost());
      sum += (int64_t{1} << kCostBits) + tile.cost();
    });
    if constexpr (kRole == PlannedRole::concurrent) {
      float pairs = group_pairs;
      if (batch.max_planned_q_len > 0) pairs += concurrent_pairs(batch, each);
#pragma unroll
      for (int step = 1; step < 32; step *= 2) pairs += __shfl_xor_sync(~0u, pairs, step);
      if (thread % 32 == 0) shared.concurrent_pairs[thread / 32] = pairs;
    }
    int64_t total;
    const int64_t sum_before = exclusive_scan<kPlanThreads>(sum, total, shared.scan);
    const Place before = {tiles_of(sum_before), cost_of(sum_before)};
    const Place all = {tiles_of(total), cost_of(total)};
    // Puts those of the thread's tiles that are among [at, at + kPlanTiles) into shared memory.
    const auto put_tiles = [&](int at) {
      int place = before.tiles - at;
      int64_t start = before.cost;
      const auto put = [&](PlannedTile tile) {
        tile.start = start;
        start += tile.cost();
        if (place >= 0 && place < kPlanTiles) shared.tiles[place] = tile;
        ++place;
      };
      if (tiles_of(sum) == 1) {
        put(own);
      } else if (sum > 0) {
        for_tiles(batch, each, group, put);
      }
    };
    put_tiles(0);
    float other_pairs = 0;
    if constexpr (kRole == PlannedRole::concurrent) {
#pragma unroll
      for (const float pairs : shared.concurrent_pairs) other_pairs += pairs;
    }
    const LineCut cut = choose_cut(params, all, longest, other_pairs);
    cut_line(shared.tiles, cut, shared.bounds);
    const int step = kPlanThreads * blocks;
    const int rank = thread * blocks + block;  // neighbouring tasks belong to different CTAs
#pragma unroll 1
    for (int i = rank; i < 2 * cut.ranges; i += step) work.tickets[i] = 0;
#pragma unroll 1
    for (int i = cut.ranges + rank; i < work.ctas; i += step) write_empty(work, i);
    __syncthreads();

    const Line line = {shared.bounds,
                       cut.ranges,
                       __fdividef(static_cast<float>(cut.ranges), static_cast<float>(cut.line)),
                       cut.groups,
                       cut.heads,
                       cut.pairs,
                       cut.parts,
                       cut.in_cluster,
                       cut.leaves_idle};
#pragma unroll 1
    for (int at = 0; at < all.tiles; at += kPlanTiles) {
      if (at > 0) {
        __syncthreads();
        put_tiles(at);
        __syncthreads();
      }
      const int count = min(kPlanTiles, all.tiles - at);
      write_items(work, line, shared.tiles, at, count, rank, step);
    }
  }

  __device__ static void run(const Params& params) {
    extern __shared__ __align__(16) char dynamic_shared[];
    auto& shared = *reinterpret_cast<SharedMemory*>(dynamic_shared);
    const int blocks = static_cast<int>(gridDim.x) - params.table_blocks;
    run_plan(params, [&] { plan(params.plan, static_cast<int>(blockIdx.x), blocks, 0, shared); });
  }
};

}  // namespace fovea::kernels::cuda
