// SPDX-License-Identifier: Apache-2.0
// Parameter blocks of the Hopper prefill kernels, read by host and device code alike.
#pragma once

#include "kernels/cuda/common/attention_params.h"
#include "kernels/cuda/common/tensor_map.h"

namespace fovea::kernels::cuda {

// Some tokens of one request. Rows of a tile are (token, q head) pairs, token-major.
struct PrefillTile {
  int32_t request;
  int32_t first_token;
};

// What prefill_order writes once per pass and every layer's prefill reads. Tiles of all requests, those
// with most keys first.
struct PrefillOrder {
  PrefillTile* tiles;
  int32_t tile_count;
  // Tiles of this many neighbouring head blocks (the q heads of a tile) are interleaved, so that their
  // keys are read while they are in the L2 cache.
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
};

struct alignas(64) PrefillParams {
  // q: [tokens, q_heads, head_dim], boxes of 64 rows: [64 >> heads_shift, 1 << heads_shift, 64].
  TensorMap q;
  // K and V: [pages, places, kv_heads, head_dim], boxes [1, box_keys, 1, 64]. Packed keys are one page.
  TensorMap k;
  TensorMap v;
  TensorMap out;  // as q, head_dim_v columns
  AttentionParams attention;
  PrefillOrder* order;
  // A tile has 2^heads_shift q heads of one kv head: a divisor of the group, at most 64.
  int32_t heads_shift;
  // Launched with programmatic serialization right behind a kernel that holds other SMs and whose
  // results it does not need: blocks begin as SMs fall free, and the first outlasts that kernel.
  int32_t beside;
  int32_t box_keys;              // divides the key tile, and the page size or the reverse
};

}  // namespace fovea::kernels::cuda
