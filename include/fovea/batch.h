// SPDX-License-Identifier: Apache-2.0
// One forward pass over several requests, as plain data. A batch is a view: every array belongs to
// the caller, lives where the backend runs, and must stay valid and unchanged from plan() until the
// last forward() of the pass has run.
//
// On a GPU that is: every array but host_* is device memory, every other field is a value of the
// host. The host never looks into an array of the device, and nothing is copied. A captured pass
// reads the arrays anew at every replay, at the addresses it was captured with: their contents may
// then be any batch of `requests` requests (padded with lengths of 0) within the limits, of at most
// `tokens` new tokens. Their contents cannot be checked there; entries of tables and out_slots that
// name no page or slot of the pool count as page 0 and as -1. A replay reads the table that was
// given at the capture.
//
// A request i brings q_len[i] new tokens; kv_lens[i] counts its tokens including them, so it is 0
// or at least q_len[i]. New token j stands at position kv_lens[i] - q_len[i] + j. Any length may be
// 0: such rows give O = 0 and LSE = -inf.
#pragma once

#include <cstddef>
#include <cstdint>

#include "fovea/attention_spec.h"

namespace fovea {

enum class ForwardMode : uint8_t {
  idle,           // no tokens; nothing is read or written
  decode,         // one new token per request
  extend,         // any number of new tokens per request
  mixed,          // extend and decode in one batch
  target_verify,  // every request brings the same number of draft tokens, usually with a tree mask
  draft_extend,   // accepted + 1 tokens per request, causal
};

// Upper bounds that reserve() sizes every buffer by. Any batch within them is accepted.
struct BatchLimits {
  int32_t max_requests = 1;
  int32_t max_tokens = 1;  // new tokens of one batch
  int32_t max_q_len = 1;   // new tokens of one request
  int32_t max_kv_len = 1;  // tokens of one request
  // Encoder tokens of one request; 0 without cross attention.
  int32_t max_encoder_len = 0;
  // Levels of shared prefixes (see BatchView::shared_prefix) that a pass attends to apart; 0: none.
  int32_t prefix_levels = 0;
  // Bytes of keys and values that a level must save from being read again, else it is left out; an
  // eleventh of that besides for each group but one. One group of 2 to 256 requests that saves as
  // much takes 2 us more to 5 us less than none (H200, 2026-11-22, docs/kernels/cascade.md).
  int64_t min_prefix_savings = 128'000'000;
  // Bytes of workspace to which layers of MLA keep by computing some heads after the others where
  // a pass would need more for all of them; what cannot be cut takes what it needs. On a GPU specs
  // with needs_lse are not cut. With 1.5 GiB, 8192 tokens of 128 heads go through in two halves:
  // 64 rows are what a block of the decode kernel takes anyway.
  int64_t workspace_budget = int64_t{3} << 29;
};

struct BatchView {
  ForwardMode mode = ForwardMode::idle;
  int32_t requests = 0;
  // New tokens of the batch; rows of q beyond them stay untouched. On a GPU an upper bound:
  // q_indptr[requests] counts.
  int32_t tokens = 0;
  // Upper bounds of this batch's lengths; 0: those of the limits. A row of the table must have room
  // for max_kv_len tokens. GPU backends choose kernels by them and use them for nothing else; last
  // bits may differ between kernels (not if batch-invariant).
  int32_t max_q_len = 0;
  int32_t max_kv_len = 0;
  // On the host, unlike all other arrays, or null: upper bounds of each request's new tokens and
  // tokens, in a captured pass those of all replays. Read by plan() alone, and used as the bounds
  // above; both or neither. Prompts gain by them, most of all beside decodes: without, a GPU
  // backend must be ready for every request being as long as the longest.
  const int32_t* host_q_lens = nullptr;   // [requests]
  const int32_t* host_kv_lens = nullptr;  // [requests]

  const int32_t* q_indptr = nullptr;      // [requests + 1], first 0, last tokens
  const int32_t* kv_lens = nullptr;       // [requests]
  const int32_t* request_rows = nullptr;  // [requests], rows of the tables, in [0, table_rows)
  // Rows of each table below that is given (the smaller number where they differ):
  // RequestTable::max_requests(). A batch with a table needs it. On the CPU plan() refuses
  // request_rows beyond it; on a GPU the caller guarantees them.
  int32_t table_rows = 0;
  // Where each request's tokens are: one of two tables, the other stays null. Entries behind a
  // request's last token are not looked at.
  // [rows, request_slots_stride] the slot of each token: RequestTable::data(), row_stride().
  const int32_t* request_slots = nullptr;
  int64_t request_slots_stride = 0;
  // [rows, page_table_stride] the pages of the request, of page_size tokens each: the block table
  // of other engines. For a window pool: pages of the full pool, whose slots it maps.
  const int32_t* page_table = nullptr;
  int64_t page_table_stride = 0;
  // [tokens] slot each new token is written to; -1 skips the write. int64 because a slot times a
  // row may exceed 2^31. No slot twice, but those of page 0, which padding alone writes to.
  const int64_t* out_slots = nullptr;
  // [tokens] logical positions. Null: kv_lens - q_len + j. Drafts of a tree share positions;
  // window, chunk, dual_chunk and ALiBi are measured on them. Given, they cost time: those of new
  // keys are read for every tile.
  const int32_t* positions = nullptr;

  // [requests] leading tokens that request i has in the same slots as request i - 1; entry 0 is not
  // looked at. Null: nothing is known to be shared. Neighbours that share enough then read their
  // prefix once, in up to BatchLimits::prefix_levels levels (a system prompt, then a document), and
  // the results are merged by LSE: cascade attention (arXiv:2501.01005, section 3.1).
  // - Neighbours of up to n = 32 * kv_heads / q_heads new tokens each, in passes of up to
  //   n * max_requests new tokens; a pass with more reads every prefix as often as it occurs.
  // - Only where nothing but order hides keys: scope decoder, mask none or tree, no window, chunk,
  //   dual chunk or ALiBi, not batch-invariant. Other layers ignore it.
  const int32_t* shared_prefix = nullptr;

  // A promise: keys and values of all tokens before the new ones were stored before plan() on its
  // stream, and nobody writes them until the last forward() of the pass has run; so no new token of
  // a request is an earlier one of another. GPU kernels for few new tokens may then read them while
  // what was enqueued ahead still runs, and decode cut its work otherwise, so that last bits may
  // differ. Without it they may arrive any time before a layer's forward(). Not for scope cross.
  bool prefix_settled = false;

  // scope cross: lengths of the encoder and, as above, one of two tables. Those of the decoder are
  // not looked at.
  const int32_t* encoder_lens = nullptr;   // [requests]
  const int32_t* encoder_slots = nullptr;  // [rows, encoder_slots_stride]
  int64_t encoder_slots_stride = 0;
  const int32_t* encoder_page_table = nullptr;  // [rows, encoder_page_table_stride]
  int64_t encoder_page_table_stride = 0;

  // mask tree: [tokens]; bit j of a token lets it see new token j of its own request (q_len <= 64).
  // All cached tokens before the new ones are visible.
  const uint64_t* tree_mask = nullptr;
  // mask custom: request i's [q_len, kv_len] bytes start at custom_mask[custom_mask_indptr[i]]; 0
  // hides.
  const uint8_t* custom_mask = nullptr;
  const int64_t* custom_mask_indptr = nullptr;  // [requests + 1]
  // mask prefix_spans: spans[2s], spans[2s+1] = [begin, end) in positions, for s in
  // [span_indptr[i], span_indptr[i+1]).
  const int32_t* spans = nullptr;
  const int32_t* span_indptr = nullptr;  // [requests + 1]
  // mask multi_item: positions below item_prefix_lens[i] are common; a later token sees them and
  // the token_pos_in_items tokens before it. A prefix beyond the last token makes all common.
  const uint32_t* item_prefix_lens = nullptr;    // [requests]
  const uint16_t* token_pos_in_items = nullptr;  // [requests, stride], indexed by position - prefix
  int64_t token_pos_in_items_stride = 0;

  // Linear layers: the state slot of each request, its own; -1 for padding (no read, no write).
  const int32_t* state_slots = nullptr;  // [requests]
  // Linear layers, or null: the slot that gets a copy of the state as it is after each new token,
  // -1 for none; no slot twice and none of state_slots. After a verification the request continues
  // from the slot of its last accepted token; in a prompt these are checkpoints for the prefix
  // cache.
  const int32_t* snapshot_slots = nullptr;  // [tokens]
};

// The table that a batch was given, of slots or of pages.
struct TokenTable {
  const int32_t* entries = nullptr;  // [rows, stride]
  int64_t stride = 0;
  int32_t entry_tokens = 1;  // that an entry stands for: 1 if it is a slot, page_size if a page
  int32_t rows = 0;

  int32_t entry(int32_t row, int64_t token) const {
    return entries[row * stride + token / entry_tokens];
  }
  int64_t slot(int32_t row, int64_t token) const {
    return int64_t{entry(row, token)} * entry_tokens + token % entry_tokens;
  }
};

// Where the keys of a layer are: scope cross has those of the encoder.
inline TokenTable token_table(const BatchView& batch, AttentionScope scope, int32_t page_size) {
  if (scope == AttentionScope::cross) {
    if (batch.encoder_page_table == nullptr) {
      return {batch.encoder_slots, batch.encoder_slots_stride, 1, batch.table_rows};
    }
    return {batch.encoder_page_table, batch.encoder_page_table_stride, page_size, batch.table_rows};
  }
  if (batch.page_table == nullptr) {
    return {batch.request_slots, batch.request_slots_stride, 1, batch.table_rows};
  }
  return {batch.page_table, batch.page_table_stride, page_size, batch.table_rows};
}

}  // namespace fovea
