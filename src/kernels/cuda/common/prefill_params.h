// SPDX-License-Identifier: Apache-2.0
// Parameter blocks of the Hopper prefill kernels, read by host and device code alike.
#pragma once

#include "kernels/cuda/common/attention_params.h"
#include "kernels/cuda/common/near_cap.h"
#include "kernels/cuda/common/tensor_map.h"

namespace fovea::kernels::cuda {

// Where a row's keys are summed in segments, these are [n * length, (n + 1) * length): the whole
// key tiles that kSegmentKeys hold (10 of 96, 8 of 128).
constexpr int32_t kSegmentKeys = 1024;

// Some tokens of one request. Rows of a tile are (token, q head) pairs, token-major.
struct PrefillTile {
  int32_t request;
  int32_t first_token;
};

// Beside a PrefillTile, where keys are summed in segments.
struct TileSegments {
  int32_t q_begin, q_len, kv_len;  // of the request: a block that starts needs no second look-up
  // Of a tile that is cut, which is all of its request's tokens: these of its segments, and where
  // the partial results of all its segments lie, in (token, segment) pairs. Else partial is -1.
  int32_t begin, end;
  int32_t partial;
};

// Weights of a row are relative to 2^base; `total` is their sum.
struct RowSums {
  float base;
  float total;
};

// Of cut tiles. Result of segment s of tokens [0, q_len), q heads [h, h + heads) of a tile: rows
// ((partial + (s - first) * q_len) * q_heads + h * q_len) and on.
struct SegmentBuffers {
  TileSegments* tiles;  // as PrefillOrder::tiles
  float* out;           // [(token, segment) pairs, q_heads, head_dim_v], relative to sums
  RowSums* sums;        // [(token, segment) pairs, q_heads]
  // [requests, head blocks], zero before and after every launch of prefill.
  int32_t* stored;
};

// What prefill_order writes once per pass and every layer's prefill reads. Tiles of all requests,
// or of sections of them; in a section those with most keys first.
struct PrefillOrder {
  PrefillTile* tiles;
  int32_t tile_count;
  // Tiles of this many neighbouring head blocks (the q heads of a tile) are interleaved, so that
  // their keys are read while they are in the L2 cache.
  int32_t section_heads;
  // Tiles taken, and blocks that have found no more. Zero before and after every launch of prefill.
  int32_t taken;
  int32_t finished;
};

struct PrefillOrderParams {
  BatchParams batch;
  PrefillOrder* order;
  PrefillTile* tiles;  // sum over requests of ceil(q_len / tokens_per_tile)
  int32_t tokens_per_tile;
  int32_t heads_shift;
  int32_t token_bytes;  // of K and V of one head
  // Where keys are summed in segments:
  SegmentBuffers segments;
  int32_t segment_keys;
  int32_t most_partials;  // (token, segment) pairs
  int32_t blocks;         // of the launches that follow
};

struct alignas(64) PrefillParams {
  // q: [tokens, q_heads, head_dim], boxes of 64 rows: [64 >> heads_shift, 1 << heads_shift, 64].
  TensorMap q;
  // K and V: [pages, places, kv_heads, head_dim], boxes [1, box_keys, 1, 64]. Packed keys are one
  // page.
  TensorMap k;
  TensorMap v;
  TensorMap shared_k;  // as k, of one head: the last columns, where all heads share them
  TensorMap out;       // as q, head_dim_v columns
  AttentionParams attention;
  PrefillOrder* order;
  // A tile has 2^heads_shift q heads of one kv head: a divisor of the group, at most 64.
  int32_t heads_shift;
  // Launched with programmatic serialization right behind a kernel that holds other SMs and whose
  // results it does not need: blocks begin as SMs fall free, and the first outlasts that kernel.
  int32_t beside;
  // The list and the page table are complete when the kernel starts: an attention launched before
  // this one has waited for them.
  int32_t list_settled;
  // So are the keys of tokens before the pass's own.
  int32_t keys_settled;
  // The kernel ahead brings the keys, and let this one begin when all before it was complete.
  int32_t keys_last;
  int32_t shared_blocks;  // of 64 columns that shared_k has
  int32_t box_keys;       // divides the key tile, and the page size or the reverse
  SegmentBuffers segments;
  NearCap cap;  // of capped scores
};

}  // namespace fovea::kernels::cuda
