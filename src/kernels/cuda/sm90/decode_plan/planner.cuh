// SPDX-License-Identifier: Apache-2.0
// From device-side lengths to the work list, without the host. Every (row tile, group of kv heads)
// pair costs its keys, counted in units of kGrain, plus kOverhead; the pairs stand in a line, which
// is cut into equal ranges, one for each CTA of the attention kernel; where all tiles are about as
// long, each pair into as many equal parts. Everything about a pair follows from where it begins in
// the line, so each thread writes its pairs on its own.
//
//   pairs    |---- 0 ----|-- 1 --|-------- 2 --------|-- 3 --|
//   ranges   |    0    |    1    |    2    |    3    |   4   |     item of (pair, range): index
//   pair + range
#pragma once

#include "kernels/cuda/common/plan_launch.cuh"
#include "kernels/cuda/common/scan.cuh"
#include "kernels/cuda/sm90/decode_plan/line.cuh"

namespace fovea::kernels::cuda {

constexpr int kMaxRanges = 1024;
constexpr int kPlanTiles = 1024;  // that are in shared memory at a time
// Of decode's work: groups that have less of it beside decode are not worth parts of tiles. 64
// requests that share 512 keys by 16 take 48.0 us on all CTAs, 54.8 on those that let both end
// together; all of 1024 49.8, 56.0 (H200, 2026-11-23).
constexpr float kLeastBeside = 0.125f;

// Whether another kernel has other requests of the batch, or groups of these, and runs beside
// decode.
enum class Company { none, beside };

template <int kRowTile, int kGrain, int kOverhead, Company kCompany>
struct DecodePlanner {
  using Params = PlanLaunch<DecodePlanParams>;
  using PlannedTile = TileOfPlan<kOverhead>;
  static constexpr int kBlocksPerSm = 1;

  struct SharedMemory {
    WarpTotals<int64_t, kPlanThreads> scan;
    float pairs_beside[kPlanThreads / 32];
    PlannedTile tiles[kPlanTiles];
    int64_t bounds[kMaxRanges + 1];
  };
  static constexpr KernelTraits kTraits = {kPlanThreads, sizeof(SharedMemory), kRowTile, kGrain};

  // Tiles and their cost, which are summed together: below 2^23 and 2^40.
  static constexpr int kCostBits = 40;
  __device__ static int tiles_of(int64_t sum) { return static_cast<int>(sum >> kCostBits); }
  __device__ static int64_t cost_of(int64_t sum) { return sum & ((int64_t{1} << kCostBits) - 1); }

  // What there is before a thread's requests, and in all.
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
    // At least one, so that every pair has a place of its own in the line.
    planned.units = max((keys.end + kGrain - 1) / kGrain - keys.begin / kGrain, 1);
    planned.start = 0;
    return planned;
  }

  // Calls visit(tile) for the tiles of a thread's requests, neighbours of which there are `each`.
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

  // (query token, key) pairs, about, of a thread's requests that another kernel works on beside
  // this one.
  __device__ static float pairs_beside(const BatchParams& batch, int each) {
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

  // CTAs for `units` of work. They and the kernel beside end together if it has the rest.
  __device__ static int fitting_ctas(const DecodePlanParams& params, int64_t units,
                                     float other_pairs) {
    const int all = params.list.ctas;
    if (other_pairs == 0) return all;
    const float beside = other_pairs / (params.pairs_per_unit * static_cast<float>(units));
    if (params.batch.max_planned_q_len == 0 && beside < kLeastBeside) return all;
    return min(max(static_cast<int>((1 - beside) * static_cast<float>(all)), params.least_ctas),
               all);
  }

  // The pair (tile, head) and its ranges.
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

  // The part of a pair in one range, and what the range's entries learn from it.
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

  // The first part of a pair, and the ranges that its overhead swallowed.
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

  // The part that a range begins with if it begins inside a pair of one of tiles[0, count).
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
    if (inside < 0 || inside >= line.groups * cost) return;  // of other tiles
    // A guess, put right: a division of 64 bits takes longer.
    int head =
        min(static_cast<int>(__fdividef(static_cast<float>(inside), static_cast<float>(cost))),
            line.groups - 1);
    while (head * cost > inside) --head;
    while ((head + 1) * cost <= inside) ++head;
    const Pair pair = find_pair(line, tile, head, tile_number + low);
    if (pair.first_range < range && range <= pair.last_range) write_part(work, line, pair, range);
  }

  // By `blocks` blocks, of which this is number `block`. group_pairs: (query token, key) pairs of
  // groups that another kernel works on beside this one, the thread's part.
  __device__ static void plan(const DecodePlanParams& params, int block, int blocks,
                              float group_pairs, SharedMemory& shared) {
    const BatchParams& batch = params.batch;
    const DecodeWork& work = params.list;
    const int thread = static_cast<int>(threadIdx.x);
    const int group = short_quotient(batch.q_heads, batch.kv_heads);
    const int each = (batch.requests + kPlanThreads - 1) / kPlanThreads;
    // How long is the line?
    PlannedTile own = {};  // the last of this thread: in a batch of few decodes all it has
    int longest = 0;
    int64_t sum = 0;
    for_tiles(batch, each, group, [&](const PlannedTile& tile) {
      own = tile;
      longest = max(longest, tile.cost());
      sum += (int64_t{1} << kCostBits) + tile.cost();
    });
    if constexpr (kCompany == Company::beside) {
      float pairs = group_pairs;
      if (batch.max_planned_q_len > 0) pairs += pairs_beside(batch, each);
#pragma unroll
      for (int step = 1; step < 32; step *= 2) pairs += __shfl_xor_sync(~0u, pairs, step);
      if (thread % 32 == 0) shared.pairs_beside[thread / 32] = pairs;
    }
    int64_t total;
    const int64_t sum_before = exclusive_scan<kPlanThreads>(sum, total, shared.scan);
    const Place before = {tiles_of(sum_before), cost_of(sum_before)};
    const Place all = {tiles_of(total), cost_of(total)};
    // Puts those of the thread's tiles that are among [at, at + kPlanTiles) where all can read
    // them.
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
    const bool kept = all.tiles <= kPlanTiles;
    float other_pairs = 0;
    if constexpr (kCompany == Company::beside) {
#pragma unroll
      for (const float pairs : shared.pairs_beside) other_pairs += pairs;
    }
    const int ctas = fitting_ctas(params, all.cost * batch.kv_heads, other_pairs);
    // As many heads an item as leave no CTA without one: tokens are then read in longer runs.
    int heads = 1;
    int groups = batch.kv_heads;
#pragma unroll 1
    while (heads<work.max_heads&& static_cast<int64_t>(all.tiles) * groups> ctas) {
      heads *= 2;
      groups /= 2;
    }
    const int64_t line = all.cost * groups;
    const int pairs = all.tiles * groups;
    const bool alike = !__syncthreads_or(64ll * longest * pairs > 65 * line) && kept;
    const bool similar = !__syncthreads_or(4ll * longest * pairs > 5 * line) && kept;
    // Items of one head are slower so, as yet unexplained: 16 log-uniform lengths took 177 us
    // instead of 172.
    const bool at_ends = alike || heads == 1;
    const int least_ctas = other_pairs > 0 ? params.least_ctas : work.ctas;
    int ranges = range_count(work, ctas, pairs, line, at_ends, least_ctas);
    // Tiles of about the same length: all get as many parts, which a cluster joins, if it takes
    // enough CTAs or the parts are short.
    int parts = similar && work.cluster > 1
                    ? max(min(work.cluster, short_quotient(ranges, max(pairs, 1))), 1)
                    : 1;
#pragma unroll 1
    while (parts > 1 && short_quotient(work.cluster, parts) * parts != work.cluster) --parts;
    const bool leaves_idle = 4 * parts * pairs < 3 * ranges;
    const bool are_short =
        line - int64_t{kOverhead} * pairs <= int64_t{work.cluster_part_units} * parts * pairs;
    if (leaves_idle && !are_short) parts = 1;
    const bool in_cluster = parts > 1;
    // Without clusters a CTA of each tile is the last to end, for it joins the parts. Where these
    // are short, the next kernel's CTAs do not wait for those: 8.7 instead of 9.2 us at 1 x 4k
    // (H200, 2026-11-22).
    const bool spares = 8 * pairs <= ctas && line <= 24ll * ctas;
    if (in_cluster) {
      ranges = parts * pairs;
    } else {
      if (spares) ranges = range_count(work, ctas - pairs, pairs, line, at_ends, least_ctas);
      if (alike && !spares && ranges > pairs) {
        const int each = short_quotient(ranges, pairs);
        if (each * pairs == ranges) parts = each;
      }
    }
    cut_line(shared.tiles, line, ranges, parts, groups, shared.bounds);
    const int step = kPlanThreads * blocks;
    const int rank = thread * blocks + block;  // neighbouring tasks are those of several CTAs
#pragma unroll 1
    for (int i = rank; i < 2 * ranges; i += step) work.tickets[i] = 0;
#pragma unroll 1
    for (int i = ranges + rank; i < work.ctas; i += step) write_empty(work, i);
    __syncthreads();

    const float ranges_per_unit = __fdividef(static_cast<float>(ranges), static_cast<float>(line));
    const Line cut = {shared.bounds, ranges, ranges_per_unit, groups,     heads,
                      pairs,         parts,  in_cluster,      leaves_idle};
#pragma unroll 1
    for (int at = 0; at < all.tiles; at += kPlanTiles) {
      if (at > 0) {
        __syncthreads();
        put_tiles(at);
        __syncthreads();
      }
      const int count = min(kPlanTiles, all.tiles - at);
#pragma unroll 1
      for (int i = rank; i < count * groups; i += step) {
        const int tile = groups == 1 ? i : short_quotient(i, groups);
        write_first(work, cut, find_pair(cut, shared.tiles[tile], i - tile * groups, at + tile));
      }
      // By warps that have no first parts, if there are enough.
#pragma unroll 1
      for (int i = step - 1 - rank; i < ranges; i += step)
        write_rest(work, cut, i, shared.tiles, count, at);
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
