// SPDX-License-Identifier: Apache-2.0
#include "dist/context_checks.h"

#include <fmt/ranges.h>

#include <string>
#include <vector>

#include "core/check.h"

namespace fovea {
namespace {

bool is_mla(const AttentionSpec& spec) { return spec.kind == AttentionKind::mla; }

int32_t query_dim(const AttentionSpec& spec) {
  if (!is_mla(spec)) return spec.head_dim;
  const int32_t own = spec.mla.nope_dim > 0 ? spec.mla.nope_dim : spec.mla.kv_lora_rank;
  return own + spec.mla.rope_dim;
}

int32_t result_dim(const AttentionSpec& spec) {
  if (!is_mla(spec)) return spec.head_dim_v;
  return spec.mla.v_dim > 0 ? spec.mla.v_dim : spec.mla.kv_lora_rank;
}

}  // namespace

void check_exchange_shape(const ContextExchangeShape& shape, const Communicator& ranks) {
  check_argument(is_floating(shape.dtype) && !is_fp8(shape.dtype),
                 "dtype is {}, accepted: fp32, fp16, bf16", dtype_name(shape.dtype));
  check_argument(shape.heads > 0, "heads is {}, must be positive", shape.heads);
  check_argument(shape.q_dim > 0, "q_dim is {}, must be positive", shape.q_dim);
  check_argument(shape.dim > 0, "dim is {}, must be positive", shape.dim);
  check_argument(shape.max_tokens > 0, "max_tokens is {}, must be positive", shape.max_tokens);
  check_enum(shape.merge, ContextMerge::gather_scatter, "merge", "ContextMerge");
  check_argument(shape.device.kind == ranks.device(),
                 "device is {}, but the communicator {} is that of {}", device_name(shape.device),
                 ranks.name(), ranks.device() == DeviceKind::cpu ? "the CPU" : "GPUs");
}

void check_exchanged_rows(const ContextExchangeShape& shape, const HeadRows& rows,
                          std::string_view name, int64_t tokens) {
  check_argument(tokens >= 0 && tokens <= shape.max_tokens, "tokens is {}, must be in [0, {}]",
                 tokens, shape.max_tokens);
  if (tokens == 0) return;
  check_argument(static_cast<bool>(rows), "{} is absent", name);
  check_argument(rows.dtype == shape.dtype, "{} is {}, must be {}", name, dtype_name(rows.dtype),
                 dtype_name(shape.dtype));
}

void check_context_options(const ContextBackendOptions& options, const AttentionBackend* local,
                           int ranks) {
  const AttentionSpec& spec = options.spec;
  check_argument(local != nullptr, "local is null");
  check_shards(options.shards, options.page_size);
  check_argument(options.shards.ranks == ranks, "shards.ranks is {}, the communicator has {}",
                 options.shards.ranks, ranks);
  const std::vector<std::string> reasons = why_not_context_parallel(spec);
  check_argument(reasons.empty(), "spec: {}", fmt::join(reasons, "; "));
  check_argument(spec.needs_lse, "spec.needs_lse is false, states are merged by LSE");
  check_argument(!spec.scores.has_sinks, "spec.scores.has_sinks is true, but sinks count once");
  check_argument(spec.q_heads > 0 && spec.q_heads % ranks == 0,
                 "spec.q_heads is {}, must be a multiple of {} ranks", spec.q_heads, ranks);
}

void check_context_batch(const BatchView& batch, const BatchLimits& limits) {
  check_argument(batch.requests >= 0 && batch.requests <= limits.max_requests,
                 "requests is {}, must be in [0, {}]", batch.requests, limits.max_requests);
  check_argument(batch.tokens >= 0 && batch.tokens <= limits.max_tokens,
                 "tokens is {}, must be in [0, {}]", batch.tokens, limits.max_tokens);
  const auto requests = static_cast<size_t>(batch.requests);
  check_argument(batch.q_indptr.size() > requests && batch.kv_lens.size() >= requests &&
                     batch.request_rows.size() >= requests,
                 "q_indptr, kv_lens and request_rows hold {}, {} and {}, too few for {} requests",
                 batch.q_indptr.size(), batch.kv_lens.size(), batch.request_rows.size(), requests);
  check_argument(
      batch.out_slots.empty() || batch.out_slots.size() >= static_cast<size_t>(batch.tokens),
      "out_slots holds {}, must hold {}", batch.out_slots.size(), batch.tokens);
  check_argument(batch.requests == 0 || batch.table, "table is absent");
}

void check_context_layer(const LayerTensors& layer) {
  check_argument(!layer.mla.q_rope, "mla.q_rope is given, q must hold its rotary part");
}

ContextExchangeShape exchange_shape(const ContextBackendOptions& options, int ranks,
                                    int32_t max_tokens, Device device) {
  const AttentionSpec& spec = options.spec;
  return {.dtype = activation_dtype(spec),
          .heads = spec.q_heads / ranks,
          .q_dim = query_dim(spec),
          .dim = result_dim(spec),
          .max_tokens = max_tokens,
          .merge = options.merge,
          .device = device};
}

}  // namespace fovea
