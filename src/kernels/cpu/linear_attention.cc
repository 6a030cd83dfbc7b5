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

// Fewer tokens are faster one by one: a chunk has to turn the state into panels and back.
constexpr int64_t kMinChunkedTokens = 64;

// Tells if the tokens of a request are computed in chunks. A snapshot ends a chunk.
bool goes_in_chunks(const StateBatch& batch, const StateSpan& span, int32_t key_dim) {
  if (key_dim > kMaxChunkKeys || span.end - span.begin < kMinChunkedTokens) return false;
  int64_t pieces = 1;
  for (int64_t token = span.begin; batch.snapshot_slots && token < span.end; ++token) {
    if (batch.snapshot_slots[token] >= 0) ++pieces;
  }
  return span.end - span.begin >= pieces * kMinChunkedTokens;
}

// The two forms of a recurrence: by_token(span, HeadRange), and chunks of a layer.
template <typename ByToken>
struct Forms {
  const ByToken& by_token;
  const ChunkedLayer& layer;
  bool in_chunks;
  Isa isa;
};

// Cuts [heads, rows] of every request between groups of rows, and runs each in its form.
template <typename ByToken>
void run_heads(const Forms<ByToken>& forms, ThreadPool& threads) {
  const ChunkedLayer& layer = forms.layer;
  const auto run_chunks = FOVEA_FOR_ISA(forms.isa, chunked_rows);
  // Chunks share the products of keys among rows, so that their parts are larger.
  const int64_t step = forms.in_chunks ? 64 : 8, rows = layer.value_dim;
  for_request_parts(
      layer.batch, threads, layer.value_heads * rows, step,
      [&](const StateSpan& span, int64_t begin, int64_t end) {
        if (span.slot < 0) {
          return clear_rows(layer.out + begin, span, layer.out_token_stride, end - begin);
        }
        if (forms.in_chunks && goes_in_chunks(layer.batch, span, layer.key_dim)) {
          return run_chunks(layer, span, begin, end);
        }
        while (begin < end) {
          const int64_t head = begin / rows;
          const int64_t head_end = std::min(end, (head + 1) * rows);
          forms.by_token(
              span, HeadRange{static_cast<int32_t>(head), static_cast<int32_t>(begin - head * rows),
                              static_cast<int32_t>(head_end - head * rows)});
          begin = head_end;
        }
      });
}

// The parts that kinds with rows of q, k and v have in common.
template <typename Params>
ChunkedLayer qkv_layer(const Params& params) {
  const int64_t keys = int64_t{params.key_heads} * params.key_dim;
  ChunkedLayer layer;
  layer.batch = params.batch;
  layer.q = params.qkv;
  layer.k = params.qkv + keys;
  layer.v = params.qkv + 2 * keys;
  layer.token_stride = 2 * keys + int64_t{params.value_heads} * params.value_dim;
  layer.log_decay = params.log_decay;
  layer.state = params.state;
  layer.state_dtype = params.state_dtype;
  layer.state_slot_stride = params.state_slot_stride;
  layer.out = params.out;
  layer.out_token_stride = params.out_token_stride;
  layer.key_heads = params.key_heads;
  layer.value_heads = params.value_heads;
  layer.key_dim = params.key_dim;
  layer.value_dim = params.value_dim;
  layer.scale = params.scale;
  return layer;
}

template <typename Params>
ChunkedLayer delta_layer(const Params& params) {
  ChunkedLayer layer = qkv_layer(params);
  layer.beta = params.beta;
  layer.l2_normalise_qk = params.l2_normalise_qk;
  layer.delta = true;
  return layer;
}

ChunkedLayer layer_of(const GatedDeltaNetParams& params) { return delta_layer(params); }
ChunkedLayer layer_of(const KdaParams& params) { return delta_layer(params); }

ChunkedLayer layer_of(const LightningParams& params) {
  ChunkedLayer layer = qkv_layer(params);
  layer.fixed_decay = true;
  return layer;
}

ChunkedLayer layer_of(const Mamba2Params& params) {
  const int64_t inputs = int64_t{params.heads} * params.head_dim;
  const int64_t states = int64_t{params.groups} * params.state_dim;
  return {.batch = params.batch,
          .q = params.xbc + inputs + states,
          .k = params.xbc + inputs,
          .v = params.xbc,
          .token_stride = inputs + 2 * states,
          .log_decay = params.log_decay,
          .beta = params.dt,
          .skip = params.skip,
          .state = params.state,
          .state_dtype = params.state_dtype,
          .state_slot_stride = params.state_slot_stride,
          .out = params.out,
          .out_token_stride = params.out_token_stride,
          .key_heads = params.groups,
          .value_heads = params.heads,
          .key_dim = params.state_dim,
          .value_dim = params.head_dim};
}

// A group of B and C is a head whose rows are channels.
ChunkedLayer layer_of(const Mamba1Params& params) {
  return {.batch = params.batch,
          .out = params.out,
          .out_token_stride = params.out_token_stride,
          .value_heads = params.groups,
          .value_dim = params.channels / params.groups};
}

}  // namespace

void causal_conv(const CausalConvParams& params, ThreadPool& threads, Isa isa) {
  check_argument(params.width >= 1, "width is {}, must be at least 1", params.width);
  const auto convolve = FOVEA_FOR_ISA(isa, convolve_channels);
  for_request_parts(params.batch, threads, params.dim, 64,
                    [&](const StateSpan& span, int64_t begin, int64_t end) {
                      if (span.slot < 0) {
                        clear_rows(params.y + begin, span, params.y_token_stride, end - begin);
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
  const auto by_token = [&](const StateSpan& span, const HeadRange& range) {
    run(params, span, range);
  };
  run_heads(Forms{by_token, layer_of(params), params.in_chunks, isa}, threads);
}

void kda(const KdaParams& params, ThreadPool& threads, Isa isa) {
  check_argument(params.key_heads >= 1 && params.value_heads % params.key_heads == 0,
                 "key_heads is {}, must divide value_heads ({})", params.key_heads,
                 params.value_heads);
  check_argument(params.key_dim <= kMaxKdaKeys, "key_dim is {}, must be at most {}", params.key_dim,
                 kMaxKdaKeys);
  const auto run = FOVEA_FOR_ISA(isa, kda_rows);
  const auto by_token = [&](const StateSpan& span, const HeadRange& range) {
    run(params, span, range);
  };
  run_heads(Forms{by_token, layer_of(params), false, isa}, threads);
}

void lightning(const LightningParams& params, ThreadPool& threads, Isa isa) {
  check_argument(params.key_heads >= 1 && params.value_heads % params.key_heads == 0,
                 "key_heads is {}, must divide value_heads ({})", params.key_heads,
                 params.value_heads);
  const auto run = FOVEA_FOR_ISA(isa, lightning_rows);
  const auto by_token = [&](const StateSpan& span, const HeadRange& range) {
    run(params, span, range);
  };
  run_heads(Forms{by_token, layer_of(params), params.in_chunks, isa}, threads);
}

void mamba2(const Mamba2Params& params, ThreadPool& threads, Isa isa) {
  check_argument(params.groups >= 1 && params.heads % params.groups == 0,
                 "groups is {}, must divide heads ({})", params.groups, params.heads);
  const auto run = FOVEA_FOR_ISA(isa, mamba2_rows);
  const auto by_token = [&](const StateSpan& span, const HeadRange& range) {
    run(params, span, range);
  };
  run_heads(Forms{by_token, layer_of(params), params.in_chunks, isa}, threads);
}

void mamba1(const Mamba1Params& params, ThreadPool& threads, Isa isa) {
  check_argument(params.groups >= 1 && params.channels % params.groups == 0,
                 "groups is {}, must divide channels ({})", params.groups, params.channels);
  const auto run = FOVEA_FOR_ISA(isa, mamba1_rows);
  const auto by_token = [&](const StateSpan& span, const HeadRange& range) {
    run(params, span, range);
  };
  run_heads(Forms{by_token, layer_of(params), false, isa}, threads);
}

}  // namespace fovea::kernels::cpu
