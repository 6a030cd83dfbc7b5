// SPDX-License-Identifier: Apache-2.0
// From an item of a list, that of sm90/prefill_order or of portable/plan, to a row tile and its key
// tiles.
#pragma once

#include "kernels/cuda/common/cluster.cuh"
#include "kernels/cuda/sm90/common/key_ranges.cuh"
#include "kernels/cuda/sm90/common/work_tile.cuh"

namespace fovea::kernels::cuda {

// Reduces the key tiles of a cut row tile to those of the block's own segments.
template <class Config>
__device__ TileCut cut_work(const BatchParams& batch, const TileSegments& tile, WorkTile& work) {
  constexpr int kBlocks = kSegmentBlocks<Config>;
  if (tile.partial < 0) return {};
  const int first = work.block_begin / kBlocks;
  const int count = (work.block_end - 1) / kBlocks + 1 - first;
  work.block_begin = max(work.block_begin, tile.begin * kBlocks);
  work.block_end = min(work.block_end, tile.end * kBlocks);
  return {first, count, tile.end - tile.begin,
          tile.partial * batch.q_heads + work.q_head * work.q_len};
}

// Returns item n of the launch. Items go by sections of head blocks: in a section, every tile from
// the one with the most keys, and for each tile the section's heads next to each other. Config has
// kKeys, kConsumers, kBlocks (of a cluster that take neighbouring tiles), kPairs, kMasked,
// kSegments and kSegmentBlocks.
template <class Config>
__device__ WorkTile work_at(const PrefillParams& params, const PrefillOrder& order, int n,
                            TileCut& cut) {
  const int tiles = order.tile_count;
  WorkTile work = {};
  const BatchParams& batch = params.attention.batch;
  const int head_blocks = batch.q_heads >> params.heads_shift;
  work.request = -1;
  if (n >= tiles * head_blocks) return work;
  const int section = n / (tiles * order.section_heads);
  const int first_head = section * order.section_heads;
  const int heads = min(order.section_heads, head_blocks - first_head);
  const int within = n - tiles * first_head;
  const PrefillTile tile = order.tiles[within / heads];
  TileSegments segments = {};
  if constexpr (Config::kSegments) segments = params.segments.tiles[within / heads];
  const RequestView view = Config::kSegments ? RequestView{tile.request, segments.q_begin,
                                                           segments.q_len, segments.kv_len}
                                             : request_view(batch, tile.request);
  work.request = tile.request;
  work.q_begin = view.q_begin;
  work.q_len = view.q_len;
  work.kv_len = view.kv_len;
  work.first_token = tile.first_token;
  work.q_head = (first_head + within % heads) << params.heads_shift;
  work.kv_head = work.q_head / (batch.q_heads / batch.kv_heads);
  if (!params.attention.keys.page_table) {
    work.first_key = params.attention.keys.kv_indptr[tile.request];
  }
  const int tokens = (kGroupRows >> params.heads_shift) * Config::kConsumers;
  const int last = min(tile.first_token + Config::kBlocks * tokens, view.q_len) - 1;
  // prefill_order cuts row tiles by what visible_keys() returns.
  const Interval keys = Config::kMasked && !Config::kSegments
                            ? tile_keys(batch.mask, view, tile.first_token, last)
                            : visible_keys(batch.mask, view, tile.first_token, last);
  if constexpr (Config::kPairs) work.first_token += cluster_rank() * tokens;
  work.key_begin = keys.begin;
  work.block_begin = keys.begin / Config::kKeys;
  work.block_end = max((keys.end + Config::kKeys - 1) / Config::kKeys, work.block_begin + 1);
  if constexpr (Config::kSegments) cut = cut_work<Config>(batch, segments, work);
  return work;
}

// Returns item n of this block's range of portable/plan's list. Keys after the part are hidden like
// those after the request's end.
template <class Config>
__device__ WorkTile part_at(const PrefillParams& params, int n, int32_t& partial,
                            int32_t& request_keys) {
  const AttentionParams& attention = params.attention;
  WorkTile work = {};
  work.request = -1;
  if (n >= attention.work.cta_end[blockIdx.x]) return work;
  const WorkItem item = attention.work.items[n];
  const RequestView view = request_view(attention.batch, item.request);
  partial = item.partial;
  request_keys = view.kv_len;
  work.request = item.request;
  work.q_begin = view.q_begin;
  work.q_len = view.q_len;
  work.kv_len = item.key_end;
  work.first_token = item.first_row >> params.heads_shift;
  work.kv_head = item.kv_head;
  work.q_head = item.kv_head << params.heads_shift;
  if constexpr (kLatentHeads<Config::kHeadDim, Config::kHeadDimV>) {
    if (!attention.keys.page_table) work.first_key = attention.keys.kv_indptr[item.request];
  }
  work.key_begin = item.key_begin;
  work.block_begin = item.key_begin / Config::kKeys;
  work.block_end = max((item.key_end + Config::kKeys - 1) / Config::kKeys, work.block_begin + 1);
  return work;
}

}  // namespace fovea::kernels::cuda
