// SPDX-License-Identifier: Apache-2.0
// Parameter blocks of the MLA decode kernels, read by host and device code alike.
#pragma once

#include "kernels/cuda/common/attention_params.h"
#include "kernels/cuda/common/tensor_map.h"

namespace fovea::kernels::cuda {

// Keys of 656-byte rows are this much larger as f16, queries as much smaller: scales down to 2^-18
// then have all bits, values up to 4094 fit.
constexpr float kKeyFactor = 16;

// Keys [key_begin, key_end) of 64 or 128 packed (token, head) rows of one request.
struct alignas(16) MlaItem {
  int32_t request;
  int32_t q_begin;  // the request's first row of q, its new tokens and its keys
  int32_t q_len;
  int32_t kv_len;
  int32_t first_row;  // of the request's packed rows
  int32_t key_begin;  // a multiple of kBlockKeys
  int32_t key_end;    // exclusive
  // -1: the item is the whole row tile. Else the slot of the partial result, kPaired, or
  // parts_of_workers.
  int32_t partial;
};

// MlaItem::partial where the row tile has two parts and mla_decode joins them: those of workers 2 w
// and 2 w + 1.
constexpr int32_t kPaired = 1 << 30;
constexpr int32_t kPairWorkers = 2;

// MlaItem::partial where mla_decode joins any number of parts: workers first to first + count - 1
// have one part each of the row tile.
constexpr int32_t parts_of_workers(int32_t first, int32_t count) { return count << 8 | first; }
constexpr int32_t first_of_parts(int32_t partial) { return partial & 255; }
constexpr int32_t count_of_parts(int32_t partial) { return partial >> 8; }
// Of a worker's part of a row tile whose first one is worker `first`'s: a worker may have the last
// part of one tile and the first of another.
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

// A worker's part of the items: begin, begin + step, ... before end.
struct alignas(16) MlaRange {
  int32_t begin, end, step;
  int32_t rank;   // which 64 rows of the items are the block's; of MlaJoins::pairs
  MlaItem first;  // items[begin] once more, so that a worker needs one read to start
};

// Who joins the parts of row tiles.
enum class MlaJoins : int32_t {
  merge,     // mla_merge, a launch of its own
  pairs,     // mla_decode joins those of two parts, the merge the others
  clusters,  // mla_decode, in clusters of blocks of kMlaClusterRows rows
  blocks,    // mla_decode: the blocks that have them
};

// What mla_plan writes and the others read. A worker is one block of mla_decode or two with 64 rows
// each of the same items. Only the first and the last item of a range can be parts of row tiles.
struct MlaWorkList {
  MlaItem* items;      // [row tiles + workers]; entries between two ranges are unused
  MlaRange* ranges;    // [workers], for MlaJoins::pairs [workers, 2]: of each block
  MlaMerge* merges;    // [workers]
  void* partial_out;   // [2 * workers, row tile, rank] f32 or f16
  float* partial_lse;  // [2 * workers, row tile]
  // [2 * workers, row tile, 2]: the powers of two of which f16 parts are multiples, for each half
  // of the columns.
  float* partial_units;
  // 0 after a plan. Of row tiles at their first worker: [workers], sm90/mla_decode/join.cuh;
  // [workers, row tile], of those with parts in several clusters.
  uint32_t* arrivals;
  int32_t workers;  // at most kMlaMaxWorkers
  // Blocks of a cluster, which join parts of row tiles (partial_out is f32 then): a power of two
  // that divides workers, each of which is a block and has one item at most. 1: no clusters.
  int32_t cluster;
};
constexpr int32_t kMlaMaxWorkers = 160;
constexpr int32_t kMlaMaxCluster = 16;

struct MlaPlanParams {
  BatchParams batch;    // masks: causal, tree
  const uint8_t* skip;  // [requests] 1: no work for this one; or null
  MlaWorkList work;
  // Whatever the balance: the bits of a row then do not depend on the batch it is in.
  int32_t whole_tiles;
  MlaJoins joins;
};

struct MlaMergeParams {
  MlaWorkList work;
  void* out;
  int64_t out_token_stride, out_head_stride;
  float* lse;  // or null
  int32_t q_heads;
};

struct alignas(64) MlaDecodeParams {
  // What a block asks for first, in 64 bytes: a launch's constants come from memory line by line,
  // each when it is first used.
  const MlaRange* ranges;     // of work
  const int32_t* page_table;  // [requests, page_table_stride]
  int64_t page_table_stride;
  int32_t page_size;
  int32_t box_keys;    // of a page that one copy brings: 8, 16, 32 or 64
  int32_t q_heads;     // of batch
  int32_t q_box_rows;  // divides q_heads and 64
  // The list and the page table are complete when the kernel starts: an attention launched before
  // this one has waited for them.
  int32_t list_settled;
  // So are the keys of the tokens before a request's new ones.
  int32_t keys_settled;
  int32_t tile_pages, tile_page_keys;  // 64 / page_size and the rest
  float scale;
  // The cache, innermost first: [64 columns, 8 keys, column blocks, groups of 8 keys, pages],
  // 128-byte swizzle; boxes [64, 8, blocks of a stage or 1, box_keys / 8, 1]. Unused by variants
  // that gather rows.
  TensorMap cache_map, cache_rope_map;
  // Latent queries, innermost first: [64 columns, q_heads, column tiles, tokens], boxes
  // [64, q_box_rows, kQueryBoxTiles, 1], or of one tile where a block has more rows than a box.
  // RoPE: [64 columns, q_heads, tokens], boxes [64, q_box_rows, 1].
  TensorMap q_latent_map, q_rope_map;
  BatchParams batch;  // kv_heads 1
  const void* cache;  // row of (page, place): page * page_stride + place * token_stride bytes
  int64_t page_stride, token_stride;
  void* out;  // [tokens, q_heads, rank]
  int64_t out_token_stride, out_head_stride;
  float* lse;  // [tokens, q_heads] or null
  MlaWorkList work;
  const float* cache_scale;  // [1] or null: 1; plain fp8 caches
  int32_t join_patience;     // cycles for which a block waits for the others' parts of a row tile
};

// Of portable/mla_decode. Strides of queries and output in elements.
struct PortableMlaParams {
  BatchParams batch;     // kv_heads 1
  const void* q_latent;  // [tokens, q_heads, rank]
  int64_t q_latent_token_stride, q_latent_head_stride;
  const void* q_rope;  // [tokens, q_heads, rope]
  int64_t q_rope_token_stride, q_rope_head_stride;
  const void* cache;  // row of (page, place): page * page_stride + place * token_stride bytes
  int64_t page_stride, token_stride;
  const int32_t* page_table;  // [requests, page_table_stride]
  int64_t page_table_stride;
  int32_t page_size;
  void* out;  // [tokens, q_heads, rank]
  int64_t out_token_stride, out_head_stride;
  float* lse;  // [tokens, q_heads] or null
  float scale;
  // Of slot s of a plain fp8 cache: cache_scale[s * cache_scale_stride]; stride 0 or 1. Null: 1.
  const float* cache_scale;
  int64_t cache_scale_stride;
  MlaWorkList work;
};

}  // namespace fovea::kernels::cuda
