// SPDX-License-Identifier: Apache-2.0
// From device-side lengths to the work list, in one CTA and without the host: every (row tile, kv head)
// pair has a cost in key blocks, the pairs stand in a line, and CTA c of the attention kernel gets the
// stretch [c, c + 1) * total / ctas of it. Everything about a pair follows from where it begins in the
// line, so each thread writes its pair's items on its own.
//
//   pairs    |---- 0 ----|-- 1 --|-------- 2 --------|-- 3 --|
//   CTAs     |    0    |    1    |    2    |    3    |   4   |     item of (pair, CTA): index pair + CTA
#pragma once

#include "kernels/cuda/common/scan.cuh"
#include "kernels/cuda/common/visibility.cuh"

namespace fovea::kernels::cuda {

constexpr int kPlanThreads = 1024;
// What an item costs besides its keys, in key blocks: loading q, storing out, filling the pipeline.
constexpr int kItemOverhead = 2;

struct PlannedTile {
  RequestView view;
  int first_row;
  int first_key;
  int begin_block;
  int blocks;
  __device__ int cost() const { return blocks + kItemOverhead; }
};

template <int kRowTile>
__device__ PlannedTile planned_tile(const PlanParams& params, int tile) {
  // The last request whose first tile is not after this one.
  int low = 0;
  int high = params.batch.requests;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (params.work.tile_indptr[middle] <= tile ? low : high) = middle;
  }
  const int group = params.batch.q_heads / params.batch.kv_heads;
  PlannedTile planned;
  planned.view = request_view(params.batch, low);
  planned.first_row = (tile - params.work.tile_indptr[low]) * kRowTile;
  const int last_row = min(planned.first_row + kRowTile, planned.view.q_len * group) - 1;
  const Interval keys = visible_keys(params.batch.mask, planned.view, planned.first_row / group,
                                     last_row / group);
  planned.first_key = keys.begin;
  planned.begin_block = keys.begin / kBlockKeys;
  planned.blocks = keys.end > keys.begin
                       ? (keys.end + kBlockKeys - 1) / kBlockKeys - planned.begin_block
                       : 0;
  return planned;
}

// Items of the pair (tile, head) that begins at `start` of the line.
template <int kRowTile>
__device__ void write_pair(const PlanParams& params, const PlannedTile& tile, int pair, int head,
                           int64_t start, int64_t per_cta, bool is_last) {
  const WorkList& work = params.work;
  const int first_cta = static_cast<int>(start / per_cta);
  const int keys_end =
      min((tile.begin_block + tile.blocks) * kBlockKeys, max(tile.view.kv_len, 0));
  // Boundary c cuts the pair where it falls among its blocks.
  const auto cut = [&](int cta) { return cta * per_cta - start; };
  int cta = first_cta;
  int from = 0;
  if (cut(first_cta) == 0) work.cta_begin[first_cta] = pair + first_cta;
  for (;; ++cta) {
    const int64_t next = cut(cta + 1);
    const bool last = params.whole_tiles || next >= tile.blocks;
    const int to = last ? tile.blocks : static_cast<int>(next);
    const bool whole = last && cta == first_cta;
    work.items[pair + cta] = {tile.view.request,
                              head,
                              tile.first_row,
                              from == 0 ? tile.first_key : (tile.begin_block + from) * kBlockKeys,
                              min((tile.begin_block + to) * kBlockKeys, keys_end),
                              whole ? -1 : cta == first_cta ? 2 * cta + 1 : 2 * cta};
    if (last) break;
    work.cta_end[cta] = pair + cta + 1;
    work.cta_begin[cta + 1] = pair + cta + 1;
    from = to;
  }
  // The range of this CTA ends here if its boundary comes before the next pair, or if there is none.
  const int64_t end = start + tile.cost();
  const int end_cta = static_cast<int>((end - 1) / per_cta);
  if (is_last || end_cta > cta || end % per_cta == 0) work.cta_end[cta] = pair + cta + 1;
  // Boundaries in the overhead: the CTA that holds the end begins with the next pair.
  if (end_cta > cta && end % per_cta != 0) work.cta_begin[end_cta] = pair + 1 + end_cta;
  if (cta > first_cta) {
    work.merges[first_cta] = {tile.view.request, head, tile.first_row, 2 * first_cta + 1,
                              cta - first_cta + 1};
  }
}

template <int kRowTile>
struct PlanConfig {
  using Params = PlanParams;
  static constexpr int kBlocksPerSm = 1;
  static constexpr KernelTraits kTraits = {kPlanThreads, 0, kRowTile, kBlockKeys};

  __device__ static void run(const Params& params) {
    __shared__ ScanMemory<int> small_scan;
    __shared__ ScanMemory<long long> scan;
    const WorkList& work = params.work;
    const int group = params.batch.q_heads / params.batch.kv_heads;
    const int heads = params.batch.kv_heads;

    int tiles = 0;
    for (int base = 0; base < params.batch.requests; base += kPlanThreads) {
      const int request = base + threadIdx.x;
      int own = 0;
      if (request < params.batch.requests) {
        own = (planned_view(params.batch, request).q_len * group + kRowTile - 1) / kRowTile;
      }
      int total;
      const int before = exclusive_scan(own, total, small_scan);
      if (request < params.batch.requests) work.tile_indptr[request] = tiles + before;
      tiles += total;
    }
    for (int cta = threadIdx.x; cta < work.ctas; cta += kPlanThreads) {
      work.cta_begin[cta] = work.cta_end[cta] = 0;
      work.merges[cta].count = 0;
    }
    __syncthreads();

    long long cost = 0;
    for (int base = 0; base < tiles; base += kPlanThreads) {
      const int tile = base + threadIdx.x;
      const long long own = tile < tiles ? planned_tile<kRowTile>(params, tile).cost() : 0;
      long long total;
      exclusive_scan(own, total, scan);
      cost += total * heads;
    }
    if (cost == 0) return;
    const long long per_cta = (cost + work.ctas - 1) / work.ctas;

    long long line = 0;
    for (int base = 0; base < tiles; base += kPlanThreads) {
      const int tile = base + threadIdx.x;
      PlannedTile planned = {};
      if (tile < tiles) planned = planned_tile<kRowTile>(params, tile);
      const long long own = tile < tiles ? planned.cost() : 0;
      long long total;
      const long long before = line + exclusive_scan(own, total, scan) * heads;
      line += total * heads;
      if (tile >= tiles) continue;
      for (int head = 0; head < heads; ++head) {
        write_pair<kRowTile>(params, planned, tile * heads + head, head, before + head * own, per_cta,
                            tile == tiles - 1 && head == heads - 1);
      }
    }
  }
};

template <int kRowTile>
using Config = PlanConfig<kRowTile>;

}  // namespace fovea::kernels::cuda
