// SPDX-License-Identifier: Apache-2.0
// Reads the lengths and slots of a batch once, so that the kernels of all layers find them in one
// load each. A block takes a request.
#pragma once

#include "kernels/cuda/common/linear_params.h"
#include "kernels/cuda/common/overlap.cuh"

namespace fovea::kernels::cuda {

template <int kThreads>
struct LinearPlanConfig {
  using Params = LinearPlanParams;
  static constexpr int kBlocksPerSm = 1;
  static constexpr KernelTraits kTraits = {kThreads, 0, 0, 0};

  // Returns the slot, or -1 if the pool has no such slot.
  __device__ static int32_t checked(const Params& params, int32_t slot) {
    return slot >= 0 && slot < params.slots ? slot : -1;
  }

  // Takes over the drafts that belong to the request's tokens now, and marks what its slot holds
  // behind this pass. Returns false if the slot does not hold what the request continues from.
  __device__ static bool take_drafts(const Params& params, int32_t request, const StateSpan& span,
                                     DraftSpan& taken) {
    const int32_t tokens = span.end - span.begin;
    const int32_t before = max(params.kv_lens[request] - tokens, 0);
    const SlotMark mark = span.from_zero ? SlotMark{} : params.marks[span.slot];
    const int32_t drafts = params.draft_counts ? params.draft_counts[request] : 0;
    const int32_t replayed = before - mark.tokens;
    if (replayed < 0 || replayed > mark.drafts) return false;
    if (drafts < 0 || drafts > min(tokens, params.max_drafts)) return false;
    taken = {replayed, drafts, mark.row, 2 * params.max_drafts};
    params.marks[span.slot] = {before + tokens - drafts, drafts, taken.row(replayed)};
    return true;
  }

  __device__ static void run(const Params& params) {
    wait_and_allow_next();
    const auto request = static_cast<int32_t>(blockIdx.x);
    const int32_t begin = params.q_indptr[request];
    const int32_t end = min(params.q_indptr[request + 1], params.tokens);
    int has_snapshot = 0;
    for (int32_t token = begin + static_cast<int32_t>(threadIdx.x); token < end;
         token += kThreads) {
      params.plan.token_requests[token] = request;
      if (params.plan.snapshot_slots) {
        const int32_t slot = checked(params, params.snapshot_slots[token]);
        params.plan.snapshot_slots[token] = slot;
        has_snapshot |= slot >= 0;
        if (params.marks && slot >= 0) {
          params.marks[slot] = {params.kv_lens[request] - (end - token) + 1, 0, 0};
        }
      }
    }
    has_snapshot = __syncthreads_or(has_snapshot);
    if (threadIdx.x != 0) return;
    StateSpan span = {begin, end, checked(params, params.state_slots[request]),
                      params.kv_lens[request] <= end - begin, false};
    DraftSpan drafts = {};
    if (params.marks) {
      const bool runs = span.slot >= 0 && begin < end;
      if (runs && !take_drafts(params, request, span, drafts)) span.slot = -1;
      params.plan.drafts[request] = drafts;
    }
    const bool is_long = params.min_chunked > 0 && end - begin >= params.min_chunked;
    const bool is_plain = !has_snapshot && drafts.replayed + drafts.drafts == 0;
    span.in_chunks = is_long && span.slot >= 0 && is_plain;
    params.plan.spans[request] = span;
  }
};

template <int kThreads>
using Config = LinearPlanConfig<kThreads>;

}  // namespace fovea::kernels::cuda
