// SPDX-License-Identifier: Apache-2.0
// Parameter blocks of the kernels of linear layers, read by host and device code alike. The
// operations are those of kernels/linear_attention.h.
#pragma once

#ifdef __CUDACC_RTC__
#include "kernels/cuda/common/types.cuh"
#else
#include <cstdint>
#endif

namespace fovea::kernels::cuda {

// The new tokens of one request and the place of its state.
struct alignas(16) StateSpan {
  int32_t begin, end;  // tokens of the batch; equal: there is nothing to do
  int32_t slot;        // -1: the tokens give 0 and no state is read or written
  int16_t from_zero;   // the slot holds no state of this request yet
  int16_t in_chunks;   // sm90/gdn_* compute the tokens, from convolved values in bf16
};

// The drafts of one request: those of earlier passes that now belong to its tokens, and those of
// this pass, which only its slot keeps. Their rows follow each other in the slot's ring.
struct alignas(16) DraftSpan {
  int32_t replayed;  // tokens before span.begin, from row `first` on
  int32_t drafts;    // tokens before span.end, whose rows follow
  int32_t first;
  int32_t rows;  // the ring's

  // Returns the row of the request's draft number `index`, replayed ones included.
  constexpr int32_t row(int32_t index) const {
    const int32_t at = first + index;
    return at < rows ? at : at - rows;
  }
};

// StateMark of a pool (fovea/kv_cache.h).
struct SlotMark {
  int32_t tokens, drafts, row;
};

// The inputs of drafts that the slots of a layer keep (DraftRow of fovea/attention_spec.h).
struct KeptInputs {
  float* rows;  // [slots, rows, size]; null: the pool keeps no drafts
  int64_t slot_stride;
  int32_t size;
  int32_t decays_at, betas_at, changes_at;
};

// The result of portable/linear_plan, which all layers of a pass share.
struct LinearPlan {
  StateSpan* spans;            // [requests]
  DraftSpan* drafts;           // [requests]; null: the pool keeps no drafts
  int32_t* token_requests;     // [tokens] the request of each token
  int32_t* snapshot_slots;     // [tokens] slots that the pool has, or -1; null: no token has one
  const int32_t* token_count;  // [1] tokens of the batch, on the device
};

// One block a request.
struct LinearPlanParams {
  LinearPlan plan;
  const int32_t* q_indptr;        // [requests + 1]
  const int32_t* kv_lens;         // [requests]
  const int32_t* state_slots;     // [requests]
  const int32_t* snapshot_slots;  // [tokens] or null
  const int32_t* draft_counts;    // [requests] or null
  SlotMark* marks;                // [slots]; null: the pool keeps no drafts
  int32_t max_drafts;
  int32_t slots;   // slots of the pool; others count as -1
  int32_t tokens;  // room of the plan's arrays
  // Requests of as many tokens, none with a snapshot and no drafts, are in_chunks; 0: none.
  int32_t min_chunked;
};

// A block takes the channels of threads in x and `tile` tokens in y; with `windows` or `requests`
// a request in y instead.
struct CausalConvKernelParams {
  LinearPlan plan;
  const float* x;       // [tokens, dim]
  const float* weight;  // [dim, width]
  const float* bias;    // [dim] or null
  float* state;         // [slots, dim, width - 1], oldest first
  int64_t state_slot_stride;
  // Raw inputs of drafts. Those of replayed ones become outputs when the window has them.
  KeptInputs kept;
  int32_t replayed_begin, replayed_end;  // channels whose outputs of replayed drafts are read
  float* y;  // [tokens, dim]; tokens in_chunks fill the first half of their row with bf16
  int64_t y_token_stride;
  int32_t plain;  // no SiLU
  int32_t dim, width;
  int32_t vectors;  // a thread takes four channels, whose values are vectors in memory
  int32_t tile;
  int32_t next_waits;  // the next kernel starts once this one has ended
};

// Type of states in memory. Those of 16 bits are rounded after every token, which reads them before
// that; by sm90/draft_products once for eight tokens, and by prefill in chunks once a pass.
enum class StateType : int32_t { f32, bf16, f16 };

// One step of a state S [rows, columns] of a head, with vectors `in` and `out` of the token:
//   delta:     S = decay S + strength (value - decay S in) in^T, result = scale * S out
//   kda:       the same with a decay of each column
//   mamba2:    S = decay S + strength value in^T,                result = S out + skip * value
//   lightning: S = decay S + value in^T,                         result = scale * S out
// portable/selective_scan takes the same parameters for mamba1, whose rows have a strength and a
// skip each, and whose decays are e^(strength A) with a constant A [heads, rows, columns].
struct RecurrenceParams {
  LinearPlan plan;
  const float* mixed;  // [tokens, mixed_stride]: in, out and value of all heads
  int64_t mixed_stride;
  int32_t requests;
  int32_t in_at, out_at, values_at;  // where they begin in a row of `mixed`
  int32_t heads;
  int32_t key_group;  // heads that share `in` and `out`
  int32_t tiles;      // blocks that share the rows of a head
  int32_t rows, columns;
  // [tokens, heads]; kda: [tokens, heads, columns]; lightning: [heads]; mamba1: A
  const float* log_decay;
  const float* strength;  // [tokens, heads]; mamba1: [tokens, heads, rows]; lightning: null
  const float* skip;      // mamba2: [heads] or null; mamba1: [heads, rows] or null
  KeptInputs kept;
  int32_t keeps_mixed;  // no convolution has kept the rows of `mixed` of drafts
  void* state;          // [slots, heads, rows, columns] of state_type
  int64_t state_slot_stride;
  float* result;  // [tokens, heads, rows]
  int64_t result_stride;
  float scale;           // not mamba2
  int32_t l2_normalise;  // delta and kda: `in` and `out` are divided by their norms
  StateType state_type;
  int32_t state_is_ready;  // the preceding kernel waited for all that wrote states and the plan
};

}  // namespace fovea::kernels::cuda
