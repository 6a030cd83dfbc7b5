// SPDX-License-Identifier: Apache-2.0
// Parameter blocks of attention whose context is distributed over GPUs, read by host and device
// code alike.
#pragma once

#include "kernels/cuda/common/rank_boxes.h"

namespace fovea::kernels::cuda {

// Rows of heads of 16-bit values. Strides count values and, like the address, are multiples of 16
// bytes.
struct ExchangedRows {
  void* data;
  int64_t token_stride, head_stride;
};

// Rows [first, first + tokens) of a batch are exchanged. Row r of the arrays of all heads belongs
// to token order[r]; order may be null: to token r. heads: of one rank. quads: 16 bytes each of a
// head.
struct ExchangedTokens {
  const int32_t* order;
  int32_t first, tokens, heads, quads;
};

// all[row] = q[token] of every rank, the heads of rank r r-th.
struct GatherQueriesParams {
  RankBoxes boxes;
  ExchangedTokens rows;
  ExchangedRows q;    // [tokens, heads]
  ExchangedRows all;  // [rows, ranks * heads]
};

// merged[token] = the states of all ranks for own heads, added in the order of the ranks.
struct MergeContextParams {
  RankBoxes boxes;
  ExchangedTokens rows;
  ExchangedRows part;    // [rows, ranks * heads]
  const float* lse;      // [rows, ranks * heads], natural
  ExchangedRows merged;  // [tokens, heads]
  float* merged_lse;     // [tokens, heads] or null
  const float* sinks;    // [heads] or null
};

// Translates a batch of the whole context to one of a rank, see ContextShards. A request becomes
// `classes` ones: class c has the new tokens c, c + classes, c + 2 * classes ... With classes ==
// ranks and interleave 1 each of them sees one key more than the one before it, as causal attention
// asks for. With classes == 0 every new token becomes a request of its own.
struct ContextPlanParams {
  const int32_t *q_indptr, *kv_lens, *request_rows;  // batch of the whole
  const int32_t* table;
  int64_t table_stride;
  int32_t entry_tokens;
  const int64_t* out_slots;  // or null
  int32_t requests, tokens;
  int32_t rank, ranks, interleave, page_size, classes;
  // The rank's batch. Local requests are numbered request by request, class by class.
  int32_t *local_indptr, *local_lens, *local_rows;
  int32_t* order;  // [tokens] the token of each row of queries
  int64_t* slots;  // [tokens] in the order of the tokens
  int32_t* pages;  // [requests, pages_stride]
  int64_t pages_stride;
};

}  // namespace fovea::kernels::cuda
