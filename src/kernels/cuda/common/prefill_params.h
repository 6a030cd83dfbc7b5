// SPDX-License-Identifier: Apache-2.0
// Parameter blocks of the Hopper prefill kernels, read by host and device code alike.
#pragma once

#include "kernels/cuda/common/attention_params.h"
#include "kernels/cuda/common/near_cap.h"
#include "kernels/cuda/common/tensor_map.h"

namespace fovea::kernels::cuda {

// If a row's keys are summed in segments, segment n has the keys [n * length, (n + 1) * length),
// where length is as many whole key tiles as fit kSegmentKeys (10 of 96 keys, 8 of 128).
constexpr int32_t kSegmentKeys = 1024;

// Some tokens of one request. Rows of a tile are (token, q head) pairs, token-major.
struct PrefillTile {
  int32_t request;
  int32_t first_token;
};

// The segments of a PrefillTile, if keys are summed in segments.
struct TileSegments {
  int32_t q_begin, q_len, kv_len;  // the request's; they save a block a second look-up
  // A cut tile has all tokens of its request. It takes the segments [begin, end), and `partial` is
  // the place of the partial results of all its segments, in (token, segment) pairs. A tile that is
  // not cut has partial -1.
  int32_t begin, end;
  int32_t partial;
};

// Weights of a row are relative to 2^base; `total` is their sum.
struct RowSums {
  float base;
  float total;
};

// The partial results of cut tiles. Those of segment s, tokens [0, q_len) and q heads [h, h +
// heads) of a tile begin at row (partial + (s - first) * q_len) * q_heads + h * q_len.
struct SegmentBuffers {
  TileSegments* tiles;  // as PrefillOrder::tiles
  float* out;           // [(token, segment) pairs, q_heads, head_dim_v], relative to sums
  RowSums* sums;        // [(token, segment) pairs, q_heads]
  // [requests, head blocks], zero before and after every launch of prefill.
  int32_t* stored;
};

// The tiles that prefill_order writes once per pass and every layer's prefill reads. They are in
// one section or in several; in a section, tiles with more keys come first.
struct PrefillOrder {
  PrefillTile* tiles;
  int32_t tile_count;
  // Tiles of this many adjacent head blocks (the q heads of a tile) alternate, so that their keys
  // are read while they are in the L2.
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
  int32_t token_bytes;  // bytes of K and V of one head
  // If keys are summed in segments:
  SegmentBuffers segments;
  int32_t segment_keys;
  int32_t max_partials;  // (token, segment) pairs
  int32_t blocks;        // blocks of the launches that follow
};

struct alignas(64) PrefillParams {
  // q: [tokens, q_heads, head_dim], boxes of 64 rows: [64 >> heads_shift, 1 << heads_shift, 64].
  TensorMap q;
  // K and V: [pages, places, kv_heads, head_dim], boxes [1, box_keys, 1, 64]. Packed keys are one
  // page.
  TensorMap k;
  TensorMap v;
  TensorMap shared_k;  // as k, one head: the last columns, if all heads share them
  TensorMap out;       // as q, head_dim_v columns
  AttentionParams attention;
  PrefillOrder* order;
  // A tile has 2^heads_shift q heads of one kv head: a divisor of the group, at most 64.
  int32_t heads_shift;
  // The preceding kernel holds other SMs, and this one does not need its results. Blocks start as
  // SMs become idle, and block 0 exits only after that kernel.
  int32_t concurrent;
  // The list and the page table are complete when the kernel starts, because an attention launched
  // before this one has waited for them.
  int32_t list_written;
  // The keys of tokens that are older than the pass are complete too.
  int32_t keys_written;
  // The preceding kernel writes the keys, and all kernels before it were complete when it let this
  // one start.
  int32_t keys_last;
  int32_t shared_blocks;  // blocks of 64 columns of shared_k
  int32_t box_keys;       // divides the key tile, and the page size or the reverse
  SegmentBuffers segments;
  NearCap cap;  // used if scores are capped
};

}  // namespace fovea::kernels::cuda
