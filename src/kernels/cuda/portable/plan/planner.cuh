// SPDX-License-Identifier: Apache-2.0
// Turns lengths on the device into the work list, in one CTA and without the host. Every pair of a
// row tile and a kv head has a cost in key blocks. The pairs stand in a line, of which CTA c of the
// attention kernel gets the stretch [c, c + 1) * total / ctas. A pair's place in the line decides
// everything about it, so every thread writes its pair's items without the others.
//
//   pairs    |---- 0 ----|-- 1 --|-------- 2 --------|-- 3 --|
//   CTAs     |    0    |    1    |    2    |    3    |   4   |   index of an item: pair + CTA
#pragma once

#include "kernels/cuda/common/division.cuh"
#include "kernels/cuda/common/plan_block.cuh"
#include "kernels/cuda/common/plan_kernel.cuh"
#include "kernels/cuda/common/prefix_groups.cuh"
#include "kernels/cuda/common/scan.cuh"
#include "kernels/cuda/common/visibility.cuh"

namespace fovea::kernels::cuda {

constexpr int kHeldTiles = 1024;  // tiles in shared memory at a time
// Cost of an item besides its keys, in key blocks: loading q, storing out, filling the pipeline.
constexpr int kItemOverhead = 2;

struct PlannedTile {
  RequestView view;
  int first_row;
  int first_key;
  int begin_block;
  int blocks;
  int64_t start;  // place of its first pair in the line
  __device__ int cost() const { return blocks + kItemOverhead; }
};

// Writes the items of the pair (tile, head) by `lanes` threads, of which this is number `lane`.
__device__ inline void write_pair(const PlanParams& params, GroupParts* parts,
                                  const PlannedTile& tile, int pair, int head, int64_t per_cta,
                                  bool is_last, int lane, int lanes) {
  const WorkList& work = params.work;
  const int64_t start = tile.start + static_cast<int64_t>(head) * tile.cost();
  const int first_cta = static_cast<int>(quotient(start, per_cta));
  const bool cuts = !params.whole_tiles && tile.blocks > 0;
  const int last_cta =
      cuts ? static_cast<int>(quotient(start + tile.blocks - 1, per_cta)) : first_cta;
  const int keys_end = min((tile.begin_block + tile.blocks) * kBlockKeys, max(tile.view.kv_len, 0));
  // Returns the block of the pair at which the stretch of a CTA begins.
  const auto cut = [&](int cta) { return static_cast<int>(cta * per_cta - start); };
  for (int cta = first_cta + lane; cta <= last_cta; cta += lanes) {
    const bool first = cta == first_cta;
    const int to = cta == last_cta ? tile.blocks : cut(cta + 1);
    work.items[pair + cta] = {tile.view.request,
                              head,
                              tile.first_row,
                              first ? tile.first_key : (tile.begin_block + cut(cta)) * kBlockKeys,
                              min((tile.begin_block + to) * kBlockKeys, keys_end),
                              first_cta == last_cta ? -1
                              : first               ? 2 * cta + 1
                                                    : 2 * cta};
    if (!first || start == cta * per_cta) work.cta_begin[cta] = pair + cta;
    if (cta < last_cta) work.cta_end[cta] = pair + cta + 1;
  }
  if (lane > 0) return;
  // The stretch of the last CTA ends here if it ends before the next pair, or if there is none.
  const int64_t end = start + tile.cost();
  const int end_cta = static_cast<int>(quotient(end - 1, per_cta));
  const bool at_boundary = (end_cta + 1) * per_cta == end;
  if (is_last || end_cta > last_cta || at_boundary) work.cta_end[last_cta] = pair + last_cta + 1;
  // A stretch that begins in the overhead of this pair: its CTA begins with the next pair.
  if (end_cta > last_cta && !at_boundary) work.cta_begin[end_cta] = pair + 1 + end_cta;
  if (parts) parts[pair] = {2 * first_cta + 1, last_cta - first_cta + 1};
  if (last_cta > first_cta) {
    work.merges[first_cta] = {tile.view.request, head, tile.first_row, 2 * first_cta + 1,
                              last_cta - first_cta + 1};
  }
}

template <int kRowTile>
struct WorkPlanner {
  using Params = PlanKernelParams<PlanParams>;
  static constexpr int kBlocksPerSm = 1;

  struct SharedMemory {
    WarpTotals<int, kPlanThreads> small_scan;
    WarpTotals<int64_t, kPlanThreads> scan;
    int tile_indptr[kHeldTiles];  // copy of work.tile_indptr, if it is no longer
    PlannedTile tiles[kHeldTiles];
  };
  using Finder = PrefixGroupsFinder<kPlanThreads>;
  static_assert(sizeof(typename Finder::SharedMemory) <= sizeof(SharedMemory));
  static constexpr KernelTraits kTraits = {kPlanThreads, sizeof(SharedMemory), kRowTile,
                                           kBlockKeys};

  // Writes the number of tiles before each request. Returns the number of all tiles.
  __device__ static int count_tiles(const PlanParams& params, SharedMemory& shared) {
    const int group = quotient(params.batch.q_heads, params.batch.kv_heads);
    int tiles = 0;
#pragma unroll 1
    for (int base = 0; base < params.batch.requests; base += kPlanThreads) {
      const int request = base + static_cast<int>(threadIdx.x);
      int own = 0;
      if (request < params.batch.requests) {
        own = (planned_view(params.batch, request).q_len * group + kRowTile - 1) / kRowTile;
      }
      int total;
      const int before = tiles + exclusive_scan<kPlanThreads>(own, total, shared.small_scan);
      if (request < params.batch.requests) params.work.tile_indptr[request] = before;
      if (request < kHeldTiles) shared.tile_indptr[request] = before;
      tiles += total;
      __syncthreads();
    }
    return tiles;
  }

  __device__ static PlannedTile planned_tile(const PlanParams& params, int tile,
                                             const SharedMemory& shared) {
    const int requests = params.batch.requests;
    const int* indptr = requests <= kHeldTiles ? shared.tile_indptr : params.work.tile_indptr;
    // The last request whose first tile is not after this one.
    int low = 0;
    int high = requests;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (indptr[middle] <= tile ? low : high) = middle;
    }
    const int group = quotient(params.batch.q_heads, params.batch.kv_heads);
    PlannedTile planned;
    planned.view = request_view(params.batch, low);
    planned.first_row = (tile - indptr[low]) * kRowTile;
    const int last_row = min(planned.first_row + kRowTile, planned.view.q_len * group) - 1;
    const Interval keys =
        visible_keys(params.batch.mask, planned.view, quotient(planned.first_row, group),
                     quotient(last_row, group));
    planned.first_key = keys.begin;
    planned.begin_block = keys.begin / kBlockKeys;
    planned.blocks =
        keys.end > keys.begin ? (keys.end + kBlockKeys - 1) / kBlockKeys - planned.begin_block : 0;
    planned.start = 0;
    return planned;
  }

  // Puts kHeldTiles tiles from `base` on, whose place in the line is `line`, into shared memory.
  // Returns their cost for one head.
  __device__ static int64_t load_tiles(const PlanParams& params, int base, int tiles, int64_t line,
                                       SharedMemory& shared) {
    int64_t cost = 0;
#pragma unroll 1
    for (int at = 0; at < min(kHeldTiles, tiles - base); at += kPlanThreads) {
      const int held = at + static_cast<int>(threadIdx.x);
      PlannedTile planned = {};
      const bool live = base + held < tiles;
      if (live) planned = planned_tile(params, base + held, shared);
      int64_t total;
      const int64_t own = live ? planned.cost() : 0;
      const int64_t before = cost + exclusive_scan<kPlanThreads>(own, total, shared.scan);
      planned.start = line + before * params.batch.kv_heads;
      shared.tiles[held] = planned;
      cost += total;
      __syncthreads();
    }
    return cost;
  }

  // Plans the batch. parts: [tiles, kv_heads] or null.
  __device__ static void plan(const PlanParams& params, GroupParts* parts, SharedMemory& shared) {
    const WorkList& work = params.work;
    const int heads = params.batch.kv_heads;
#pragma unroll 1
    for (int cta = threadIdx.x; cta < work.ctas; cta += kPlanThreads) {
      work.cta_begin[cta] = work.cta_end[cta] = 0;
      work.merges[cta].count = 0;
    }
    const int tiles = count_tiles(params, shared);
    int64_t cost = 0;
#pragma unroll 1
    for (int base = 0; base < tiles; base += kHeldTiles) {
      cost += load_tiles(params, base, tiles, 0, shared) * heads;
    }
    if (cost == 0) return;
    const int64_t per_cta = quotient(cost + work.ctas - 1, int64_t{work.ctas});
    int64_t line = 0;
#pragma unroll 1
    for (int base = 0; base < tiles; base += kHeldTiles) {
      if (tiles > kHeldTiles) line += load_tiles(params, base, tiles, line, shared) * heads;
      const int pairs = min(kHeldTiles, tiles - base) * heads;
      int lanes = 1;  // threads of a pair
      while (2 * lanes * pairs <= kPlanThreads) lanes *= 2;
#pragma unroll 1
      for (int i = threadIdx.x; i < pairs * lanes; i += kPlanThreads) {
        const int pair = i / lanes;
        const int tile = quotient(pair, heads);
        const int number = base * heads + pair;
        write_pair(params, parts, shared.tiles[tile], number, pair - tile * heads, per_cta,
                   number == tiles * heads - 1, i % lanes, lanes);
      }
      if (tiles > kHeldTiles) __syncthreads();  // the tiles are read
    }
  }

  // Turns a pointer into level 0's work list into that of another level.
  template <typename T>
  __device__ static T* of_level(T* pointer, const PlanTasks& tasks, int level) {
    return pointer
               ? reinterpret_cast<T*>(reinterpret_cast<char*>(pointer) + level * tasks.level_bytes)
               : nullptr;
  }

  // Turns the plan of level 0 of a cascade into that of another level.
  __device__ static void turn_to_level(PlanParams& plan, const PlanTasks& tasks, int level) {
    const PrefixGroups& groups = tasks.prefixes.groups[level];
    plan.batch.q_indptr = groups.q_indptr;
    plan.batch.kv_lens = groups.kv_lens;
    plan.batch.mask.first_keys = groups.first_keys;
    WorkList& work = plan.work;
    work.items = of_level(work.items, tasks, level);
    work.cta_begin = of_level(work.cta_begin, tasks, level);
    work.cta_end = of_level(work.cta_end, tasks, level);
    work.merges = of_level(work.merges, tasks, level);
    work.tile_indptr = of_level(work.tile_indptr, tasks, level);
  }

  __device__ static void run(const Params& params) {
    extern __shared__ __align__(16) char dynamic_shared[];
    run_plan(params, [&] {
      const PlanTasks& tasks = params.tasks;
      const bool of_levels = tasks.level_bytes > 0;
      const int level = of_levels ? static_cast<int>(blockIdx.x) : 0;
      if (tasks.prefixes.levels > 0) {
        Finder::run(tasks.prefixes, of_levels ? level + 1 : tasks.prefixes.levels, level,
                    *reinterpret_cast<typename Finder::SharedMemory*>(dynamic_shared));
      }
      PlanParams own = params.plan;
      if (of_levels) turn_to_level(own, tasks, level);
      plan(own, nullptr, *reinterpret_cast<SharedMemory*>(dynamic_shared));
    });
  }
};

}  // namespace fovea::kernels::cuda
