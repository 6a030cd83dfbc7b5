// SPDX-License-Identifier: Apache-2.0
// Parameter blocks of the MLA decode kernels, read by host and device code alike.
#pragma once

#include "kernels/cuda/common/attention_params.h"
#include "kernels/cuda/common/tensor_map.h"

namespace fovea::kernels::cuda {

// Keys of 656-byte rows become f16 times this factor, and queries are divided by it: scales down to
// 2^-18 then keep all their bits, and values up to 4094 fit.
constexpr float kKeyFactor = 16;

// A work item: keys [key_begin, key_end) for one row tile of packed (token, head) rows of a
// request.
struct alignas(16) MlaItem {
  int32_t request;
  int32_t q_begin;  // the request's first row of q
  int32_t q_len;    // its new tokens
  int32_t kv_len;
  int32_t first_row;  // among the request's packed rows
  int32_t key_begin;  // a multiple of kBlockKeys
  int32_t key_end;    // exclusive
  // -1: the item is the whole row tile. Otherwise the slot of the partial result, kPaired, or
  // parts_of_workers().
  int32_t partial;
};

// MlaItem::partial of a row tile whose two parts sm90/mla_decode joins: those of workers 2 w and
// 2 w + 1.
constexpr int32_t kPaired = 1 << 30;
constexpr int32_t kPairWorkers = 2;

// MlaItem::partial of a row tile whose parts sm90/mla_decode_16 joins: workers first to
// first + count - 1 have one part each.
constexpr int32_t parts_of_workers(int32_t first, int32_t count) { return count << 8 | first; }
constexpr int32_t first_of_parts(int32_t partial) { return partial & 255; }
constexpr int32_t count_of_parts(int32_t partial) { return partial >> 8; }
// Returns the slot of a worker's part of a row tile whose first part is worker `first`'s. A worker
// has two slots, as it may have the last part of one tile and the first part of another.
constexpr int32_t slot_of_worker(int32_t worker, int32_t first) {
  return 2 * worker + (worker == first ? 1 : 0);
}

// The parts of one row tile that several workers computed, in ascending order of keys: slot
// `first`, then count - 1 slots from first + 1 in steps of two. count 0: nothing to do.
struct MlaMerge {
  int32_t q_begin;
  int32_t q_len;
  int32_t first_row;
  int32_t first;
  int32_t count;
};

// A worker's items: begin, begin + step, ... before end.
struct alignas(16) MlaRange {
  int32_t begin, end, step;
  int32_t rank;   // MlaJoins::pairs: which 64 rows of the items are the block's
  MlaItem first;  // copy of items[begin], so that a worker starts after one read
};

// How the parts of row tiles are joined.
enum class MlaJoins : int32_t {
  merge,     // by mla_merge, a launch of its own
  pairs,     // row tiles of two parts by sm90/mla_decode, others by the merge
  clusters,  // by sm90/mla_decode_16, in clusters of blocks
  blocks,    // by sm90/mla_decode_16, by the blocks that computed them
};

// The work list that mla_plan writes and the other kernels read. A worker is one block of the
// attention kernel, or two with 64 rows each of the same items. Only the first and the last item of
// a range can be parts of row tiles.
struct MlaWorkList {
  MlaItem* items;      // [row tiles + workers]; entries between two ranges are unused
  MlaRange* ranges;    // [workers], for MlaJoins::pairs [workers, 2]: one for each block
  MlaMerge* merges;    // [workers]
  void* partial_out;   // [2 * workers, row tile, rank] f32 or f16
  float* partial_lse;  // [2 * workers, row tile]
  // [2 * workers, row tile, 2]: units of f16 parts, powers of two, for each half of the columns.
  float* partial_units;
  // Counters, 0 after a plan, at the first worker of a row tile. MlaJoins::blocks: [workers];
  // clusters: [workers, row tile], for row tiles with parts in several clusters.
  uint32_t* arrivals;
  int32_t workers;  // at most kMlaMaxWorkers
  // Blocks of a cluster, a power of two that divides `workers`; 1: no clusters. In clusters each
  // worker is a block with at most one item, and partial_out is f32.
  int32_t cluster;
};
constexpr int32_t kMlaMaxWorkers = 160;
constexpr int32_t kMlaMaxCluster = 16;

struct MlaPlanParams {
  BatchParams batch;    // masks: causal, tree
  const uint8_t* skip;  // [requests] 1: no work for this one; or null
  MlaWorkList work;
  // Do not cut row tiles: the bits of a row then do not depend on the rest of the batch.
  int32_t whole_tiles;
  MlaJoins joins;
};

// Query rows: the row of (token, head) is at token * token_stride + head * head_stride elements.
struct MlaQueries {
  const void* data;
  int64_t token_stride, head_stride;
};
// Results, with rows as in MlaQueries; lse [tokens, q_heads], natural log, or null.
struct MlaOutput {
  void* data;
  int64_t token_stride, head_stride;
  float* lse;
};
// Page ids, [requests, stride].
struct MlaPageTable {
  const int32_t* pages;
  int64_t stride;
};

struct MlaMergeParams {
  MlaWorkList work;
  MlaOutput out;  // [tokens, q_heads, rank]
  int32_t q_heads;
};

struct alignas(64) MlaDecodeParams {
  // These 64 bytes hold everything that a block reads first: a launch's constants are read from
  // memory line by line, each at its first use.
  const MlaRange* ranges;  // as in work
  MlaPageTable page_table;
  int32_t page_size;
  int32_t box_keys;    // keys of a page that one copy brings: 8, 16, 32 or 64
  int32_t q_heads;     // as in batch
  int32_t q_box_rows;  // divides q_heads and 64
  // The list and the page table are complete when the kernel starts, because an attention launched
  // before it has waited for them.
  int32_t list_complete;
  // The keys of tokens before a request's new ones are complete as well.
  int32_t keys_complete;
  int32_t tile_pages, tile_page_keys;  // quotient and remainder of 64 keys and page_size
  float scale;
  // The cache, innermost first: [64 columns, 8 keys, column blocks, groups of 8 keys, pages],
  // 128-byte swizzle; boxes [64, 8, column tiles of a stage or 1, box_keys / 8, 1]. Unused where
  // keys are loaded row by row.
  TensorMap cache_map, cache_rope_map;
  // Latent queries, innermost first: [64 columns, q_heads, column tiles, tokens], boxes
  // [64, q_box_rows, QueryLayout::box_tiles, 1], or of one tile if a block has more rows than a
  // box. RoPE columns: [64 columns, q_heads, tokens], boxes [64, q_box_rows, 1].
  TensorMap q_latent_map, q_rope_map;
  BatchParams batch;  // kv_heads 1
  const void* cache;  // row of (page, place): page * page_stride + place * token_stride bytes
  int64_t page_stride, token_stride;
  MlaOutput out;  // [tokens, q_heads, rank]
  MlaWorkList work;
  const float* cache_scale;  // [1] or null: 1; plain fp8 caches
  int32_t join_patience;     // cycles that a block waits for other blocks' parts of a row tile
};

// Parameters of portable/mla_decode.
struct PortableMlaParams {
  BatchParams batch;    // kv_heads 1
  MlaQueries q_latent;  // [tokens, q_heads, rank]
  MlaQueries q_rope;    // [tokens, q_heads, rope]
  const void* cache;    // row of (page, place): page * page_stride + place * token_stride bytes
  int64_t page_stride, token_stride;
  MlaPageTable page_table;
  int32_t page_size;
  MlaOutput out;  // [tokens, q_heads, rank]
  float scale;
  // The scale of slot s of a plain fp8 cache is cache_scale[s * cache_scale_stride], stride 0 or 1;
  // null: 1.
  const float* cache_scale;
  int64_t cache_scale_stride;
  MlaWorkList work;
};

}  // namespace fovea::kernels::cuda
