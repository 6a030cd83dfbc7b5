// SPDX-License-Identifier: Apache-2.0
#include "attention/validate/spec.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "attention/names.h"
#include "attention/prefix_levels.h"
#include "core/check.h"
#include "core/check_device.h"
#include "kernels/linear_attention.h"
#include "kernels/mla_row.h"

namespace fovea {
namespace {

// Keeps products with lengths inside 64 bits. The largest models have 2^17 values.
constexpr int64_t kMaxRowValues = int64_t{1} << 24;

// Beyond these limits scores, or their quotients by the cap, become 0 or infinity in f32.
constexpr float kMaxScale = 1e6f;
constexpr float kMinCap = 1e-6f, kMaxCap = 1e6f;

void validate_enums(const AttentionSpec& spec) {
  check_enum(spec.kind, AttentionKind::short_conv, "kind", "AttentionKind");
  check_enum(spec.scope, AttentionScope::cross, "scope", "AttentionScope");
  check_enum(spec.mask, MaskKind::multi_item, "mask", "MaskKind");
  check_enum(spec.q_dtype, DType::u8, "q_dtype", "DType");
}

void validate_scores(const AttentionSpec& spec) {
  check_argument(spec.scores.softmax_scale >= 0 && spec.scores.softmax_scale <= kMaxScale,
                 "scores.softmax_scale is {}, must be in [0, {}]", spec.scores.softmax_scale,
                 kMaxScale);
  check_argument(spec.scores.logit_cap == 0 ||
                     (spec.scores.logit_cap >= kMinCap && spec.scores.logit_cap <= kMaxCap),
                 "scores.logit_cap is {}, must be 0 or in [{}, {}]", spec.scores.logit_cap, kMinCap,
                 kMaxCap);
}

void check_row_values(int64_t values) {
  check_argument(values <= kMaxRowValues, "a token has {} values in its heads, at most {}", values,
                 kMaxRowValues);
}

void check_positive(int32_t value, std::string_view name) {
  check_argument(value > 0, "{} is {}, must be positive", name, value);
}

// Throws if a field that another kind uses is not 0.
void check_unused(int32_t value, std::string_view name, const AttentionSpec& spec) {
  check_argument(value == 0, "{} is {}, must be 0 for kind {}", name, value, name_of(spec.kind));
}

void check_mla_unused(const AttentionSpec& spec) {
  check_unused(spec.mla.kv_lora_rank, "mla.kv_lora_rank", spec);
  check_unused(spec.mla.rope_dim, "mla.rope_dim", spec);
  check_unused(spec.mla.nope_dim, "mla.nope_dim", spec);
  check_unused(spec.mla.v_dim, "mla.v_dim", spec);
}

void check_linear_unused(const AttentionSpec& spec) {
  check_unused(spec.linear.key_heads, "linear.key_heads", spec);
  check_unused(spec.linear.value_heads, "linear.value_heads", spec);
  check_unused(spec.linear.key_dim, "linear.key_dim", spec);
  check_unused(spec.linear.value_dim, "linear.value_dim", spec);
  check_unused(spec.linear.conv_width, "linear.conv_width", spec);
}

void check_head_dims_unused(const AttentionSpec& spec) {
  check_unused(spec.head_dim, "head_dim", spec);
  check_unused(spec.head_dim_v, "head_dim_v", spec);
}

void check_heads(const AttentionSpec& spec) {
  check_positive(spec.q_heads, "q_heads");
  check_positive(spec.kv_heads, "kv_heads");
  check_argument(spec.q_heads % spec.kv_heads == 0,
                 "q_heads is {}, must be a multiple of kv_heads {}", spec.q_heads, spec.kv_heads);
}

void validate_mha(const AttentionSpec& spec) {
  check_mla_unused(spec);
  check_linear_unused(spec);
  check_heads(spec);
  check_positive(spec.head_dim, "head_dim");
  check_positive(spec.head_dim_v, "head_dim_v");
  check_row_values(int64_t{spec.q_heads} * std::max(spec.head_dim, spec.head_dim_v));
}

void validate_mla(const AttentionSpec& spec) {
  const MlaSpec& mla = spec.mla;
  check_linear_unused(spec);
  check_head_dims_unused(spec);
  check_heads(spec);
  check_argument(spec.kv_heads == 1, "kv_heads is {}, kind mla has 1", spec.kv_heads);
  check_argument(spec.scope == AttentionScope::decoder, "scope is {}, kind mla has decoder only",
                 name_of(spec.scope));
  check_positive(mla.kv_lora_rank, "mla.kv_lora_rank");
  check_argument(mla.rope_dim >= 0, "mla.rope_dim is {}, must not be negative", mla.rope_dim);
  check_argument(mla.nope_dim >= 0 && mla.v_dim >= 0 && (mla.nope_dim > 0) == (mla.v_dim > 0),
                 "mla.nope_dim {} and mla.v_dim {} must both be positive or both 0", mla.nope_dim,
                 mla.v_dim);
  const int64_t row = int64_t{mla.kv_lora_rank} + mla.rope_dim;
  const int64_t q = int64_t{mla.nope_dim} + mla.rope_dim;
  check_row_values(int64_t{spec.q_heads} * std::max({row, q, int64_t{mla.v_dim}}));
  check_argument(mla.nope_dim > 0 || spec.scores.softmax_scale > 0,
                 "scores.softmax_scale is 0, absorbed queries (mla.nope_dim 0) need a scale");
}

void check_no_scores(const AttentionSpec& spec) {
  for (const auto& [name, value] :
       {std::pair{"window", static_cast<double>(spec.window)},
        {"chunk", static_cast<double>(spec.chunk)},
        {"scores.logit_cap", static_cast<double>(spec.scores.logit_cap)},
        {"scores.has_sinks", static_cast<double>(spec.scores.has_sinks)},
        {"scores.has_alibi", static_cast<double>(spec.scores.has_alibi)},
        {"needs_lse", static_cast<double>(spec.needs_lse)}}) {
    check_argument(value == 0, "{} is {}, must be 0: linear kinds have no scores", name, value);
  }
}

// Checks the heads of q and k, which short_conv does not have.
void validate_keys(const AttentionSpec& spec) {
  const LinearSpec& linear = spec.linear;
  if (spec.kind == AttentionKind::short_conv) {
    check_unused(linear.key_heads, "linear.key_heads", spec);
    check_unused(linear.key_dim, "linear.key_dim", spec);
    check_argument(linear.conv_width >= 2,
                   "linear.conv_width is {}, kind short_conv needs 2 or more", linear.conv_width);
    return;
  }
  check_positive(linear.key_heads, "linear.key_heads");
  check_positive(linear.key_dim, "linear.key_dim");
  check_argument(linear.value_heads % linear.key_heads == 0,
                 "linear.value_heads is {}, must be a multiple of linear.key_heads {}",
                 linear.value_heads, linear.key_heads);
  check_argument(spec.kind != AttentionKind::kda || linear.key_dim <= kernels::kMaxKdaKeys,
                 "linear.key_dim is {}, kind kda has at most {}", linear.key_dim,
                 kernels::kMaxKdaKeys);
  check_argument(spec.kind != AttentionKind::mamba1 || linear.value_dim == 1,
                 "linear.value_dim is {}, kind mamba1 has 1: its heads are channels",
                 linear.value_dim);
}

void validate_linear(const AttentionSpec& spec) {
  const LinearSpec& linear = spec.linear;
  check_mla_unused(spec);
  check_unused(spec.q_heads, "q_heads", spec);
  check_unused(spec.kv_heads, "kv_heads", spec);
  check_head_dims_unused(spec);
  check_positive(linear.value_heads, "linear.value_heads");
  check_positive(linear.value_dim, "linear.value_dim");
  validate_keys(spec);
  check_row_values(int64_t{std::max(linear.key_heads, linear.value_heads)} *
                   std::max(linear.key_dim, linear.value_dim));
  check_argument(linear.conv_width >= 0, "linear.conv_width is {}, must not be negative",
                 linear.conv_width);
  check_argument(spec.scope == AttentionScope::decoder,
                 "scope is {}, linear kinds have decoder only", name_of(spec.scope));
  check_argument(spec.mask == MaskKind::none, "mask is {}, linear kinds take none",
                 name_of(spec.mask));
  check_no_scores(spec);
}

void validate_kind(const AttentionSpec& spec) {
  switch (spec.kind) {
    case AttentionKind::mha:
      return validate_mha(spec);
    case AttentionKind::mla:
      return validate_mla(spec);
    case AttentionKind::gated_delta_net:
    case AttentionKind::mamba2:
    case AttentionKind::kda:
    case AttentionKind::lightning:
    case AttentionKind::mamba1:
    case AttentionKind::short_conv:
      return validate_linear(spec);
  }
}

void validate_rope(const AttentionSpec& spec) {
  if (!spec.has_rope) return;
  check_argument(!is_linear(spec.kind), "kind is {}, has_rope needs mha or mla",
                 name_of(spec.kind));
  check_argument(spec.kind != AttentionKind::mla || spec.mla.rope_dim > 0,
                 "mla.rope_dim is 0, has_rope needs a rotary key to turn");
  check_argument(
      spec.scope == AttentionScope::decoder || spec.scope == AttentionScope::encoder_cache,
      "scope is {}, has_rope needs decoder or encoder_cache: k is rotated on its way to the cache",
      name_of(spec.scope));
}

void validate_fp8_query(const AttentionSpec& spec) {
  if (!is_fp8(spec.q_dtype)) return;
  const std::string_view dtype = dtype_name(spec.q_dtype);
  check_argument(spec.q_dtype == DType::f8e4m3, "q_dtype is {}, of fp8 types only {} multiplies",
                 dtype, dtype_name(DType::f8e4m3));
  check_argument(spec.kind == AttentionKind::mha && uses_kv_cache(spec),
                 "q_dtype is {}, which needs kind mha and a cache", dtype);
  check_argument(!spec.has_rope, "has_rope: q of {} cannot be rotated in place", dtype);
}

// Checks windows, chunks, biases and masks, which need a query's own position among the keys.
void validate_mask(const AttentionSpec& spec) {
  check_argument(spec.window >= 0, "window is {}, must not be negative", spec.window);
  check_argument(spec.chunk >= 0, "chunk is {}, must not be negative", spec.chunk);
  if (spec.scope == AttentionScope::decoder) return;
  check_argument(is_causal(spec.scope) || (spec.window == 0 && spec.chunk == 0),
                 "window {} and chunk {} need scope decoder or ragged: they look back only",
                 spec.window, spec.chunk);
  check_argument(
      spec.mask == MaskKind::none ||
          (spec.mask == MaskKind::custom && spec.scope != AttentionScope::cross),
      "mask {} needs scope decoder, scope is {}; ragged and encoders take custom masks only",
      name_of(spec.mask), name_of(spec.scope));
  check_argument(!spec.scores.has_alibi || spec.scope != AttentionScope::cross,
                 "scores.has_alibi: distances have no meaning in scope cross");
}

void validate_dual_chunk(const AttentionSpec& spec) {
  const DualChunk& dual = spec.dual_chunk;
  check_argument(dual.chunk_size >= 0, "dual_chunk.chunk_size is {}, must not be negative",
                 dual.chunk_size);
  check_argument(dual || dual.local_size == 0,
                 "dual_chunk.local_size is {}, must be 0 where chunk_size is 0", dual.local_size);
  if (!dual) return;
  check_argument(dual.local_size >= 0 && dual.local_size < dual.chunk_size,
                 "dual_chunk.local_size is {}, must be in [0, {}), below chunk_size",
                 dual.local_size, dual.chunk_size);
  check_argument(spec.kind == AttentionKind::mha, "kind is {}, dual_chunk needs mha",
                 name_of(spec.kind));
  check_argument(is_causal(spec.scope),
                 "scope is {}, dual_chunk needs decoder or ragged: it looks back only",
                 name_of(spec.scope));
  check_argument(spec.chunk == 0, "chunk is {}, must be 0: dual_chunk has chunks of its own",
                 spec.chunk);
  check_argument(spec.mask != MaskKind::prefix_spans,
                 "mask is {}, whose keys are seen across the chunks of dual_chunk",
                 name_of(spec.mask));
}

}  // namespace

float softmax_scale(const AttentionSpec& spec) {
  if (spec.scores.softmax_scale != 0) return spec.scores.softmax_scale;
  const int32_t width = spec.kind == AttentionKind::mla ? spec.mla.nope_dim + spec.mla.rope_dim
                        : is_linear(spec.kind)          ? spec.linear.key_dim
                                                        : spec.head_dim;
  return 1.0f / std::sqrt(static_cast<float>(width));
}

void validate_spec(const AttentionSpec& spec) {
  validate_enums(spec);
  validate_kind(spec);
  validate_mask(spec);
  validate_dual_chunk(spec);
  validate_rope(spec);
  validate_fp8_query(spec);
  validate_scores(spec);
}

void validate_cache(const AttentionSpec& spec, const KvCacheSpec& cache) {
  if (!uses_kv_cache(spec)) return;
  check_enum(cache.layout, KvLayout::mla_fp8_rows, "cache layout", "KvLayout");
  check_enum(cache.order, KvOrder::hnd, "cache order", "KvOrder");
  check_enum(cache.dtype, DType::u8, "cache dtype", "DType");
  check_enum(cache.scale, KvScale::per_token_head, "cache scale", "KvScale");
  check_argument(!is_fp8(spec.q_dtype) || cache.dtype == spec.q_dtype,
                 "cache dtype is {}, q_dtype {} needs the same", dtype_name(cache.dtype),
                 dtype_name(spec.q_dtype));
  check_argument(cache.scale == KvScale::none || is_fp8(cache.dtype),
                 "cache scale is {}, only fp8 caches take scales and this one's dtype is {}",
                 name_of(cache.scale), dtype_name(cache.dtype));
  check_argument(cache.page_size >= 1, "cache page_size is {}, must be at least 1",
                 cache.page_size);
  check_argument(cache.layers >= 0, "cache layers is {}, must not be negative", cache.layers);
  check_argument((spec.kind == AttentionKind::mla) == (cache.layout != KvLayout::mha),
                 "cache layout is {}, kind {} needs {}", name_of(cache.layout), name_of(spec.kind),
                 spec.kind == AttentionKind::mla ? "mla or mla_fp8_rows" : "mha");
  check_argument(cache.kv_heads == spec.kv_heads, "cache kv_heads is {}, the layers have {}",
                 cache.kv_heads, spec.kv_heads);
  check_argument(cache.head_dim == cached_key_dim(spec), "cache head_dim is {}, the layers have {}",
                 cache.head_dim, cached_key_dim(spec));
  check_argument(cache.head_dim_v == cached_value_dim(spec),
                 "cache head_dim_v is {}, the layers have {}", cache.head_dim_v,
                 cached_value_dim(spec));
  check_argument(
      cache.layout != KvLayout::mla_fp8_rows || fits_mla_fp8_rows(cache),
      "cache layout mla_fp8_rows holds {} + {} values of {} with scales {}, the layers have {} + {}"
      " and the cache dtype is {} with scales {}",
      kernels::kMlaRowLatent, kernels::kMlaRowRope, dtype_name(DType::f8e4m3),
      name_of(KvScale::none), spec.mla.kv_lora_rank, spec.mla.rope_dim, dtype_name(cache.dtype),
      name_of(cache.scale));
  check_argument(cache.window >= 0, "cache window is {}, must not be negative", cache.window);
  if (cache.window == 0) return;
  const auto fits = [&](int32_t reach) { return reach > 0 && reach <= cache.window; };
  check_argument(fits(spec.window) || fits(spec.chunk),
                 "cache window is {}, it drops keys the layers still see (window {}, chunk {})",
                 cache.window, spec.window, spec.chunk);
}

void validate_state(const AttentionSpec& spec, const StateCacheSpec& state) {
  const LinearSpec& linear = spec.linear;
  if (spec.kind == AttentionKind::short_conv) {
    check_argument(state.heads == 0 && state.rows == 0,
                   "state heads is {} and rows {}, both are 0 for kind short_conv", state.heads,
                   state.rows);
  } else {
    check_argument(state.heads == linear.value_heads,
                   "state heads is {}, the layers have value_heads {}", state.heads,
                   linear.value_heads);
    check_argument(state.rows == linear.value_dim, "state rows is {}, the layers have value_dim {}",
                   state.rows, linear.value_dim);
  }
  check_argument(state.columns == linear.key_dim, "state columns is {}, the layers have key_dim {}",
                 state.columns, linear.key_dim);
  check_argument(
      state.dtype == DType::f32 || state.dtype == DType::bf16 || state.dtype == DType::f16,
      "state dtype is {}, must be {}, {} or {}", dtype_name(state.dtype), dtype_name(DType::f32),
      dtype_name(DType::bf16), dtype_name(DType::f16));
  if (state.max_drafts != 0) {
    check_argument(can_keep_drafts(spec.kind),
                   "state max_drafts is {}, kind {} keeps no drafts: use linear.snapshot_slots",
                   state.max_drafts, name_of(spec.kind));
    check_argument(state.max_drafts > 0 && state.max_drafts <= kMaxSlotDrafts,
                   "state max_drafts is {}, must be in [0, {}]", state.max_drafts, kMaxSlotDrafts);
    check_argument(state.draft_inputs == draft_row(spec).size,
                   "state draft_inputs is {}, draft_row() of the layers has size {}",
                   state.draft_inputs, draft_row(spec).size);
  }
  if (linear.conv_width == 0) return;
  check_argument(state.conv_dim == conv_dim_of(spec), "state conv_dim is {}, the layers have {}",
                 state.conv_dim, conv_dim_of(spec));
  check_argument(state.conv_width == linear.conv_width,
                 "state conv_width is {}, the layers have {}", state.conv_width, linear.conv_width);
}

void validate_limits(const AttentionSpec& spec, const BatchLimits& limits) {
  check_argument(limits.max_requests >= 1, "max_requests is {}, must be at least 1",
                 limits.max_requests);
  check_argument(limits.max_tokens >= 1, "max_tokens is {}, must be at least 1", limits.max_tokens);
  const int32_t heads = std::max({spec.q_heads, spec.linear.key_heads, 1});
  check_argument(limits.max_tokens <= INT32_MAX / heads,
                 "max_tokens is {}, at most {} with {} heads: rows are 32-bit", limits.max_tokens,
                 INT32_MAX / heads, heads);
  check_argument(limits.max_q_len >= 1, "max_q_len is {}, must be at least 1", limits.max_q_len);
  check_argument(limits.max_kv_len >= 1, "max_kv_len is {}, must be at least 1", limits.max_kv_len);
  check_argument(limits.max_encoder_len >= 0, "max_encoder_len is {}, must not be negative",
                 limits.max_encoder_len);
  check_argument(limits.prefix_levels >= 0 && limits.prefix_levels <= kMaxPrefixLevels,
                 "prefix_levels is {}, must be in [0, {}]", limits.prefix_levels, kMaxPrefixLevels);
  check_argument(limits.min_prefix_savings >= 0, "min_prefix_savings is {}, must not be negative",
                 limits.min_prefix_savings);
  check_argument(limits.workspace_budget >= 0, "workspace_budget is {}, must not be negative",
                 limits.workspace_budget);
  check_argument(spec.scope != AttentionScope::cross || limits.max_encoder_len >= 1,
                 "max_encoder_len is 0, scope cross needs at least 1");
}

void validate_request(const BackendRequest& request) {
  validate_spec(request.spec);
  validate_cache(request.spec, request.cache);
  validate_limits(request.spec, request.limits);
  check_device(request.device.device(), "device");
  check_argument(request.device.cores >= 1, "device cores is {}, must be at least 1",
                 request.device.cores);
}

}  // namespace fovea
