// SPDX-License-Identifier: Apache-2.0
// Parameter blocks of attention whose context is distributed over GPUs, read by host and device
// code alike.
#pragma once

#include "kernels/cuda/common/rank_sum_params.h"

namespace fovea::kernels::cuda {

// A word of a box that holds this has not arrived. Two NaNs of 16 bits, or one of 32: senders write
// kOtherNan instead.
constexpr uint32_t kNotArrived = 0xffffffff;
constexpr uint32_t kOtherNan = 0x7fffffff;

// Boxes that an inbox has room for, used in turn.
constexpr int kBoxes = 3;

// Counters of one rank, in its own memory; zero at first.
struct BoxCounters {
  uint32_t turn;      // box of the next message
  uint32_t finished;  // blocks that have ended the current message
  int32_t words;      // length of the last message to each rank
};

// How one rank exchanges messages of words with the others. There are two ways:
//
// Over peers' memory, every rank has an inbox [kBoxes, ranks, capacity] of words. Ranks write their
// messages into the boxes of all others; words of kNotArrived are waited for. The kernel of message
// n clears the box of message n - 1, which the sender of message n + 2 may then use: it sends that
// after it has received message n + 1, which its receiver has sent after its kernel of message n
// had ended.
//
// Over a communicator, one kernel writes all messages to memory of its own GPU (`sends` alone), the
// communicator exchanges them, and a second kernel takes what has arrived (`receives` alone).
//
// With neither, a rank computes with its own part only.
struct ContextBoxes {
  uint32_t* to[kMaxSumRanks];  // where the message to each rank begins, in box 0
  uint32_t* from;              // box 0 of the own inbox
  int64_t box_stride;          // words between boxes; 0: there is one
  int64_t part_stride;         // words between the messages of two ranks in a box of `from`
  BoxCounters* counters;       // null if there is one box
  // As in RankMessages.
  uint32_t* stop;
  int64_t timeout_ns;
  int32_t rank, ranks;
  int32_t sends, receives;  // not 0: true
};

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
  ContextBoxes boxes;
  ExchangedTokens rows;
  ExchangedRows q;    // [tokens, heads]
  ExchangedRows all;  // [rows, ranks * heads]
};

// merged[token] = the states of all ranks for own heads, added in the order of the ranks.
struct MergeContextParams {
  ContextBoxes boxes;
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
