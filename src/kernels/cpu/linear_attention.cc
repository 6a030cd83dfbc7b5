// SPDX-License-Identifier: Apache-2.0
#include "kernels/linear_attention.h"

#include <algorithm>

#include "core/check.h"
#include "core/rounding.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/simd/linear_attention.h"

namespace fovea::kernels::cpu {
namespace {

StateSpan span_of(const StateBatch& batch, int64_t request) {
  StateSpan span;
  span.begin = batch.q_indptr[request];
  span.end = batch.q_indptr[request + 1];
  span.slot = batch.state_slots[request];
  span.from_zero = batch.kv_lens[request] == span.end - span.begin;
  return span;
}

void clear_rows(float* out, const StateSpan& span, int64_t token_stride, int64_t size) {
  for (int64_t token = span.begin; token < span.end; ++token) {
    std::fill_n(out + token * token_stride, size, 0.0f);
  }
}

// Cuts `items` of every request into parts, so that all threads have work, and calls body(span,
// begin, end). `begin` and `end` are multiples of `step`, except the last `end`. Skips requests
// without tokens.
template <typename Body>
void for_request_parts(const StateBatch& batch, ThreadPool& threads, int64_t items, int64_t step,
                       const Body& body) {
  if (batch.requests == 0 || items == 0) return;
  const int64_t wanted = threads.size() == 1 ? 1 : threads.size() * 4;
  const int64_t size = round_up(ceil_div(items, ceil_div(wanted, batch.requests)), step);
  const int64_t parts = ceil_div(items, size);
  threads.parallel_for(batch.requests * parts, [&](int64_t task, int) {
    const StateSpan span = span_of(batch, task / parts);
    if (span.begin == span.end) return;
    const int64_t begin = task % parts * size;
    body(span, begin, std::min(items, begin + size));
  });
}

// Cuts [heads, rows] of every request between groups of eight rows.
template <typename Body>
void for_head_parts(const StateBatch& batch, ThreadPool& threads, int32_t heads, int32_t rows,
                    const Body& body) {
  const int64_t total = static_cast<int64_t>(heads) * rows;
  for_request_parts(batch, threads, total, 8,
                    [&](const StateSpan& span, int64_t begin, int64_t end) {
                      while (begin < end) {
                        HeadRange range;
                        range.head = static_cast<int32_t>(begin / rows);
                        range.row_begin = static_cast<int32_t>(begin % rows);
                        const int64_t head_end = std::min(end, (begin / rows + 1) * rows);
                        range.row_end = range.row_begin + static_cast<int32_t>(head_end - begin);
                        body(span, range);
                        begin = head_end;
                      }
                    });
}

}  // namespace

void causal_conv(const CausalConvParams& params, ThreadPool& threads, Isa isa) {
  check_argument(params.width >= 1, "width is {}, must be at least 1", params.width);
  const auto convolve = FOVEA_FOR_ISA(isa, convolve_channels);
  for_request_parts(params.batch, threads, params.dim, 64,
                    [&](const StateSpan& span, int64_t begin, int64_t end) {
                      if (span.slot < 0) {
                        clear_rows(params.y + begin, span, params.dim, end - begin);
                      } else {
                        convolve(params, span, static_cast<int32_t>(begin),
                                 static_cast<int32_t>(end));
                      }
                    });
}

void gated_delta_net(const GatedDeltaNetParams& params, ThreadPool& threads, Isa isa) {
  check_argument(params.key_heads >= 1 && params.value_heads % params.key_heads == 0,
                 "key_heads is {}, must divide value_heads ({})", params.key_heads,
                 params.value_heads);
  const auto run = FOVEA_FOR_ISA(isa, gated_delta_net_rows);
  for_head_parts(params.batch, threads, params.value_heads, params.value_dim,
                 [&](const StateSpan& span, const HeadRange& range) {
                   if (span.slot >= 0) return run(params, span, range);
                   clear_rows(params.out + int64_t{range.head} * params.value_dim + range.row_begin,
                              span, params.out_token_stride, range.row_end - range.row_begin);
                 });
}

void mamba2(const Mamba2Params& params, ThreadPool& threads, Isa isa) {
  check_argument(params.groups >= 1 && params.heads % params.groups == 0,
                 "groups is {}, must divide heads ({})", params.groups, params.heads);
  const auto run = FOVEA_FOR_ISA(isa, mamba2_rows);
  for_head_parts(params.batch, threads, params.heads, params.head_dim,
                 [&](const StateSpan& span, const HeadRange& range) {
                   if (span.slot >= 0) return run(params, span, range);
                   clear_rows(params.out + int64_t{range.head} * params.head_dim + range.row_begin,
                              span, params.out_token_stride, range.row_end - range.row_begin);
                 });
}

}  // namespace fovea::kernels::cpu
