// SPDX-License-Identifier: Apache-2.0
// One forward pass over several requests, as plain data. A batch is a view: every array belongs to
// the caller, lives where the backend runs, and must stay valid and unchanged from plan() until the
// last forward() of the pass has run.
//
// Arrays are spans. An empty span means "absent". An array must have at least the extent that its
// comment states; it may be longer. On a GPU, spans describe device memory (host_* arrays are the
// exception): the host reads their address and size, never an element, and copies nothing. plan()
// checks extents on every device and contents on the CPU only. On a GPU, entries of tables and
// out_slots that name no page or slot of the pool count as page 0 and as -1.
//
// A captured pass reads the arrays again at every replay, at the addresses it was captured with.
// Their contents may then be any batch within the limits that has `requests` requests (padded with
// lengths of 0) and at most `tokens` new tokens. Every other field keeps its value from the
// capture.
//
// Request i has q_len[i] new tokens. kv_lens[i] counts all its tokens including the new ones, so it
// is 0 or at least q_len[i]. New token j stands at position kv_lens[i] - q_len[i] + j. Any length
// may be 0; rows that see no key give O = 0 and LSE = -inf.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "fovea/api.h"
#include "fovea/attention_spec.h"
#include "fovea/kv_cache.h"

namespace FOVEA_API fovea {

enum class ForwardMode : uint8_t {
  idle,           // no tokens; nothing is read or written
  decode,         // one new token per request
  extend,         // any number of new tokens per request
  mixed,          // extend and decode in one batch
  target_verify,  // the same number of draft tokens for every request, usually with a tree mask
};

// Upper bounds by which reserve() sizes every buffer. A backend accepts any batch within them.
struct BatchLimits {
  int32_t max_requests = 1;
  int32_t max_tokens = 1;       // new tokens of one batch
  int32_t max_q_len = 1;        // new tokens of one request
  int32_t max_kv_len = 1;       // tokens of one request
  int32_t max_encoder_len = 0;  // encoder tokens of one request; 0 without cross attention
  // Levels of shared prefixes (BatchHints::shared_prefix) that a pass attends to separately; 0: it
  // reads every prefix as often as it occurs.
  int32_t prefix_levels = 0;
  // A prefix level is used only if it saves at least this many bytes of KV reads, plus 1/11 of it
  // for each group of requests after the first (docs/kernels/cascade.md).
  int64_t min_prefix_savings = 128'000'000;
  // Bytes of workspace that MLA layers try to keep to: a pass that needs more computes its heads in
  // several rounds. A pass that cannot be divided takes what it needs. On a GPU, layers with
  // needs_lse are not divided.
  int64_t workspace_budget = int64_t{3} << 29;
};

// Mask tree. Bit j of token t lets t see new token j of its own request, which has at most 64 new
// tokens. All tokens before the new ones are visible.
struct TreeMask {
  std::span<const uint64_t> ancestors = {};  // [tokens]
};

// Mask custom. The [q_len, kv_len] bytes of request i start at visible[indptr[i]]; 0 hides a key.
struct CustomMask {
  std::span<const uint8_t> visible = {};  // [indptr[requests]]
  std::span<const int64_t> indptr = {};   // [requests + 1]
};

// Mask prefix_spans. Span s is [bounds[2 * s], bounds[2 * s + 1]) in positions; request i has the
// spans [indptr[i], indptr[i + 1]).
struct PrefixSpans {
  std::span<const int32_t> bounds = {};  // [2 * indptr[requests]]
  std::span<const int32_t> indptr = {};  // [requests + 1]
};

// Mask multi_item. All tokens see positions below prefix_lens[i]. A later token sees these and the
// token_pos tokens before itself, which are those of its item. A prefix that covers the whole
// request makes all positions common.
struct MultiItemMask {
  std::span<const uint32_t> prefix_lens = {};  // [requests]
  std::span<const uint16_t> token_pos = {};    // [requests, stride], indexed by position - prefix
  int64_t stride = 0;                          // elements between requests
};

// Contents of masks. A backend reads the one that its AttentionSpec::mask names, so one batch can
// serve layer groups with different masks.
struct BatchMasks {
  TreeMask tree = {};
  CustomMask custom = {};
  PrefixSpans spans = {};
  MultiItemMask items = {};
};

// The encoder's tokens, for scope cross.
struct CrossBatch {
  std::span<const int32_t> lens = {};  // [requests] encoder tokens
  TokenTable table = {};               // rows as BatchView::request_rows
};

// States of linear layers. On a GPU, slots that the pool does not have count as -1.
struct LinearBatch {
  // [requests] the state slot of each request, owned by it alone; -1 for padding, which reads and
  // writes no state.
  std::span<const int32_t> state_slots = {};
  // [tokens] or absent: the slot that receives a copy of the state after each new token, -1 for
  // none. Slots are distinct and differ from all state_slots. After a verification the request
  // continues from the slot of its last accepted token; in a prompt the copies are checkpoints for
  // the prefix cache.
  std::span<const int32_t> snapshot_slots = {};
  // [requests] or absent: how many of a request's new tokens, the last ones, are drafts; at most
  // StateCacheSpec::max_drafts. They do not change the state: the slot keeps their inputs. The next
  // pass over the slot takes those that its lengths count, a prefix of them, into the state and
  // forgets the others. So accepted drafts are a length, as those of a KV cache are, and a
  // verification reads and writes each state once, as a decode step does.
  //
  // plan() takes them over, in stream order: once a pass is planned, its layers must run before
  // another plan() over these slots. Over a pool that keeps drafts, a request with earlier tokens
  // continues from a number of tokens that its slot holds (StatePool::marks()): a CPU refuses any
  // other number, and on a GPU such a request counts as one without a slot.
  std::span<const int32_t> draft_counts = {};
};

// Facts about a batch that the caller may know. Hints make a pass faster. They can change the last
// bits of results, but not if the spec is batch_invariant.
struct BatchHints {
  // Upper bounds on the lengths of this batch; 0: those of the limits. A row of the table must have
  // room for max_kv_len tokens. GPU backends choose kernels by them.
  int32_t max_q_len = 0;
  int32_t max_kv_len = 0;
  // [requests], host memory on every device, or absent (both or neither): upper bounds on the new
  // tokens and on the tokens of each request; in a captured pass they hold for all replays. Only
  // plan() reads them. Prompts gain most when the batch also has decodes: without these arrays a
  // GPU backend must assume that every request is as long as the longest.
  std::span<const int32_t> host_q_lens = {};
  std::span<const int32_t> host_kv_lens = {};
  // [requests] or absent: leading tokens that request i keeps in the same slots as request i - 1;
  // entry 0 is ignored. Neighbouring requests that share enough read their prefix once, in up to
  // BatchLimits::prefix_levels levels (a system prompt, then a document); the results are merged by
  // LSE: cascade attention (arXiv:2501.01005, section 3.1).
  // - A request joins with up to n = 32 * kv_heads / q_heads new tokens, in passes of up to
  //   n * max_requests new tokens; longer passes read every prefix as often as it occurs.
  // - Layers use it only if nothing but order hides keys: scope decoder, mask none or tree, no
  //   window, chunk, dual chunk or ALiBi, not batch-invariant.
  std::span<const int32_t> shared_prefix = {};
  // A promise: the keys and values of all tokens before the new ones were stored, in stream order,
  // before plan(), and nobody writes them until the last forward() of the pass has run. So no new
  // token of one request is an earlier token of another. GPU kernels for few new tokens then read
  // these keys while preceding work still runs. Without the promise, keys may arrive any time
  // before the layer's forward(). Not for scope cross.
  bool prefix_written = false;
};

struct BatchView {
  ForwardMode mode = ForwardMode::idle;
  int32_t requests = 0;
  // New tokens of the batch. Rows of q beyond them stay untouched. On a GPU this is an upper bound:
  // q_indptr[requests] is the number.
  int32_t tokens = 0;

  std::span<const int32_t> q_indptr = {};  // [requests + 1], first 0, last `tokens`
  std::span<const int32_t> kv_lens = {};   // [requests]
  // [requests] row of each request in the tables, in [0, table.rows). The CPU's plan() refuses
  // other rows; on a GPU the caller guarantees the range.
  std::span<const int32_t> request_rows = {};
  // The slots or the pages of each request. Entries after a request's last token are not read. For
  // a window pool it names slots or pages of the full pool, which the pool's slot map translates.
  TokenTable table = {};
  // [tokens] slot that each new token is written to; -1 skips the write. No slot occurs twice, but
  // padding may write to page 0 any number of times. 64 bits, because a slot times the width of a
  // row may exceed 2^31.
  std::span<const int64_t> out_slots = {};
  // [tokens] logical positions; absent: kv_lens - q_len + j. Drafts of a tree share positions.
  // Window, chunk, dual_chunk and ALiBi are measured on them. Leave them absent when possible:
  // kernels re-read the positions of new keys for every key tile.
  std::span<const int32_t> positions = {};

  BatchMasks masks = {};
  CrossBatch cross = {};
  LinearBatch linear = {};
  BatchHints hints = {};
};

// The table that holds the keys of a layer: scope cross has those of the encoder.
inline const TokenTable& key_table(const BatchView& batch, AttentionScope scope) {
  return scope == AttentionScope::cross ? batch.cross.table : batch.table;
}

}  // namespace fovea
