// SPDX-License-Identifier: Apache-2.0
#include "attention/validate/layer.h"

#include <cmath>
#include <string_view>
#include <utility>

#include "attention/names.h"
#include "core/check.h"
#include "core/strided_rows.h"

namespace fovea {
namespace {

// Returns the rows [tokens, heads, dim] of a tensor.
StridedRows strided(const HeadRows& rows, int64_t tokens, int64_t heads, int64_t dim) {
  return {.data = rows.data,
          .element_bytes = static_cast<int64_t>(dtype_bytes(rows.dtype)),
          .row = dim,
          .dimensions = {{{tokens, rows.token_stride}, {heads, rows.head_stride}}}};
}

// Shape and type that a tensor must have.
struct RowShape {
  int64_t tokens, heads, dim;
  DType dtype;
};

void check_rows(const HeadRows& rows, const RowShape& shape, std::string_view name) {
  const size_t bytes = dtype_bytes(shape.dtype);
  check_argument(rows.data != nullptr, "{} is null", name);
  check_argument(rows.dtype == shape.dtype, "{} is {}, the spec's q_dtype asks for {}", name,
                 dtype_name(rows.dtype), dtype_name(shape.dtype));
  check_argument(reinterpret_cast<uintptr_t>(rows.data) % bytes == 0,
                 "{} is at {}, must be aligned to {} bytes", name, rows.data, bytes);
  check_reach(strided(rows, shape.tokens, shape.heads, shape.dim), name);
}

void check_optional(const void* given, bool wanted, std::string_view name, std::string_view flag) {
  check_argument((given != nullptr) == wanted, "{} is {}, but the spec's {} is {}", name,
                 given != nullptr ? "given" : "null", flag, wanted);
}

// Throws if rows that are written share memory.
void check_apart(const HeadRows& rows, int64_t tokens, int64_t heads, int64_t dim,
                 std::string_view name) {
  check_argument(are_disjoint(strided(rows, tokens, heads, dim)),
                 "{} has strides of {} a token and {} a head: rows of {} values overlap", name,
                 rows.token_stride, rows.head_stride, dim);
}

void check_head_norm(const HeadNorm& norm, const AttentionSpec& spec, std::string_view name) {
  if (norm.weight == nullptr) return;
  check_argument(spec.has_rope && spec.kind == AttentionKind::mha && !spec.dual_chunk,
                 "{} is given, but the spec has has_rope {}, kind {} and dual_chunk.chunk_size {}; "
                 "norms need has_rope, mha and 0",
                 name, spec.has_rope, name_of(spec.kind), spec.dual_chunk.chunk_size);
  check_aligned(norm.weight, fmt::format("{}.weight", name));
  check_argument(std::isfinite(norm.epsilon) && norm.epsilon >= 0,
                 "{}.epsilon is {}, must be finite and not negative", name, norm.epsilon);
}

void check_rotary(const RotaryTensors& rotary, const AttentionSpec& spec) {
  check_head_norm(rotary.q_norm, spec, "rotary.q_norm");
  check_head_norm(rotary.k_norm, spec, "rotary.k_norm");
  check_optional(rotary.cos, spec.has_rope, "rotary.cos", "has_rope");
  if (!spec.has_rope) return;
  check_argument(rotary.sin != nullptr, "rotary.sin is null");
  check_argument(rotary.positions != nullptr, "rotary.positions is null");
  check_aligned(rotary.cos, "rotary.cos");
  check_aligned(rotary.sin, "rotary.sin");
  check_aligned(rotary.positions, "rotary.positions");
  check_argument(rotary.max_positions > 0, "rotary.max_positions is {}, must be positive",
                 rotary.max_positions);
  check_argument(!spec.dual_chunk || rotary.max_positions > spec.dual_chunk.chunk_size,
                 "rotary.max_positions is {}, must be above the dual_chunk.chunk_size of {}",
                 rotary.max_positions, spec.dual_chunk.chunk_size);
  const int32_t width = spec.kind == AttentionKind::mla ? spec.mla.rope_dim : spec.head_dim;
  check_argument(rotary.rotary_dim > 0 && rotary.rotary_dim % 2 == 0 && rotary.rotary_dim <= width,
                 "rotary.rotary_dim is {}, must be even and in [2, {}]", rotary.rotary_dim, width);
}

// Checks a weight [q_heads, rows, kv_lora_rank].
void check_weight(std::string_view name, const void* data, int64_t head_stride, int64_t rows,
                  DType dtype, const AttentionSpec& spec) {
  const auto bytes = static_cast<int64_t>(dtype_bytes(dtype));
  const int64_t head = rows * spec.mla.kv_lora_rank;
  check_argument(reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(bytes) == 0,
                 "mla.weights.{} is at {}, must be aligned to {} bytes", name, data, bytes);
  check_argument(head_stride == 0 || head_stride >= head,
                 "mla.weights.{}_head_stride is {}, must be 0 or at least {}, the values of a head",
                 name, head_stride, head);
  check_reach({.data = data,
               .element_bytes = bytes,
               .row = head,
               .dimensions = {{{spec.q_heads, head_stride}}}},
              name);
}

void check_mla_weights(const MlaWeights& weights, const AttentionSpec& spec) {
  const bool given = weights.w_uk != nullptr && weights.w_uv != nullptr;
  const bool none = weights.w_uk == nullptr && weights.w_uv == nullptr;
  check_argument(spec.mla.nope_dim > 0 ? given : none,
                 "mla.weights {}, but the spec's mla.nope_dim is {}",
                 given  ? "are given"
                 : none ? "are null"
                        : "are half given",
                 spec.mla.nope_dim);
  if (none) return;
  check_enum(weights.dtype, DType::u8, "mla.weights.dtype", "DType");
  check_argument(is_floating(weights.dtype) && !is_fp8(weights.dtype),
                 "mla.weights.dtype is {}, accepted: fp32, bf16, fp16", name_of(weights.dtype));
  check_weight("w_uk", weights.w_uk, weights.w_uk_head_stride, spec.mla.nope_dim, weights.dtype,
               spec);
  check_weight("w_uv", weights.w_uv, weights.w_uv_head_stride, spec.mla.v_dim, weights.dtype, spec);
}

// Checks the queries that dual chunk attention needs; with has_rope forward() makes them.
void check_dual_queries(const LayerTensors& layer, const AttentionSpec& spec,
                        const RowShape& shape) {
  const bool wanted = spec.dual_chunk && !spec.has_rope;
  for (const auto& [name, rows] : {std::pair{"dual_chunk.q_succ", layer.dual_chunk.q_succ},
                                   {"dual_chunk.q_inter", layer.dual_chunk.q_inter}}) {
    if (wanted) {
      check_rows(rows, shape, name);
    } else {
      check_argument(!rows,
                     "{} is given, but the spec's dual_chunk.chunk_size is {} and has_rope {}",
                     name, spec.dual_chunk.chunk_size, spec.has_rope);
    }
  }
}

void refuse_given(bool given, std::string_view name, const AttentionSpec& spec) {
  check_argument(!given, "{} is given, but the spec's kind is {}", name, name_of(spec.kind));
}

// Returns the values of a row of q. mla: without the rotary part if it comes separately.
int64_t query_dim(const LayerTensors& layer, const AttentionSpec& spec) {
  if (spec.kind != AttentionKind::mla) return spec.head_dim;
  const int64_t front = spec.mla.nope_dim > 0 ? spec.mla.nope_dim : spec.mla.kv_lora_rank;
  return front + (layer.mla.q_rope ? 0 : spec.mla.rope_dim);
}

void refuse_keys(const LayerTensors& layer, const AttentionSpec& spec) {
  refuse_given(bool{layer.k}, "k", spec);
  refuse_given(bool{layer.v}, "v", spec);
}

void refuse_mla(const MlaTensors& mla, const AttentionSpec& spec) {
  refuse_given(bool{mla.latent}, "mla.latent", spec);
  refuse_given(bool{mla.k_rope}, "mla.k_rope", spec);
  refuse_given(bool{mla.q_rope}, "mla.q_rope", spec);
  refuse_given(mla.weights.w_uk != nullptr || mla.weights.w_uv != nullptr, "mla.weights", spec);
}

void check_keys(const LayerTensors& layer, const AttentionSpec& spec, int64_t tokens) {
  const DType dtype = activation_dtype(spec);
  if (spec.kind == AttentionKind::mla) {
    check_rows(layer.mla.latent, {tokens, 1, spec.mla.kv_lora_rank, dtype}, "mla.latent");
    if (spec.mla.rope_dim == 0) return;
    check_rows(layer.mla.k_rope, {tokens, 1, spec.mla.rope_dim, dtype}, "mla.k_rope");
    return;
  }
  check_rows(layer.k, {tokens, spec.kv_heads, spec.head_dim, dtype}, "k");
  check_rows(layer.v, {tokens, spec.kv_heads, spec.head_dim_v, dtype}, "v");
}

void check_q_scale(const LayerTensors& layer, const AttentionSpec& spec, int64_t tokens) {
  if (layer.q_scale.data == nullptr) return;
  check_argument(is_fp8(spec.q_dtype), "q_scale is given, but the spec's q_dtype is {}",
                 dtype_name(spec.q_dtype));
  check_aligned(layer.q_scale.data, "q_scale");
  check_reach({.data = layer.q_scale.data,
               .element_bytes = sizeof(float),
               .row = 1,
               .dimensions = {{{tokens, layer.q_scale.token_stride},
                               {spec.q_heads, layer.q_scale.head_stride}}}},
              "q_scale");
}

// The second call of a layer of kind mamba1 has no convolution.
void check_convolution(const LinearTensors& linear, const AttentionSpec& spec) {
  const bool given = linear.conv_weight != nullptr;
  const bool optional = spec.kind == AttentionKind::mamba1 && !given;
  check_argument(optional || given == (spec.linear.conv_width > 0),
                 "linear.conv_weight is {}, but the spec's linear.conv_width is {}",
                 given ? "given" : "null", spec.linear.conv_width);
  if (spec.kind != AttentionKind::short_conv) {
    refuse_given(linear.plain_conv, "linear.plain_conv", spec);
  }
}

// Checks what the recurrence takes next to `mixed`; a convolution alone takes none of it.
void check_gates(const LinearTensors& linear, const AttentionSpec& spec) {
  const bool has_skip = spec.kind == AttentionKind::mamba1 || spec.kind == AttentionKind::mamba2;
  if (!has_skip) refuse_given(linear.skip != nullptr, "linear.skip", spec);
  if (!has_delta_rule(spec.kind)) {
    refuse_given(linear.l2_normalise_qk, "linear.l2_normalise_qk", spec);
  }
  if (convolves_alone(spec.kind) && linear.conv_weight != nullptr) {
    for (const auto& [name, array] : {std::pair{"linear.log_decay", linear.log_decay},
                                      {"linear.beta", linear.beta},
                                      {"linear.skip", linear.skip}}) {
      check_argument(array == nullptr, "{} is given, but the call has linear.conv_weight", name);
    }
    return;
  }
  check_argument(linear.log_decay != nullptr, "linear.log_decay is null");
  if (spec.kind == AttentionKind::lightning) {
    refuse_given(linear.beta != nullptr, "linear.beta", spec);
  } else {
    check_argument(linear.beta != nullptr, "linear.beta is null");
  }
}

}  // namespace

void validate_linear_layer(const LayerTensors& layer, const AttentionSpec& spec,
                           const BatchView& batch) {
  const LinearTensors& linear = layer.linear;
  check_argument(linear.mixed != nullptr, "linear.mixed is null");
  check_convolution(linear, spec);
  check_gates(linear, spec);
  check_argument(
      layer.out.data != nullptr && layer.out.dtype == DType::f32 &&
          layer.out.head_stride == spec.linear.value_dim,
      "out is {} with a head stride of {}, must be f32 with a head stride of value_dim = {}",
      layer.out.data == nullptr ? "null" : dtype_name(layer.out.dtype), layer.out.head_stride,
      spec.linear.value_dim);
  check_rows(layer.out, {batch.tokens, spec.linear.value_heads, spec.linear.value_dim, DType::f32},
             "out");
  check_apart(layer.out, batch.tokens, spec.linear.value_heads, spec.linear.value_dim, "out");
  check_aligned(linear.mixed, "linear.mixed");
  check_aligned(linear.conv_weight, "linear.conv_weight");
  check_aligned(linear.conv_bias, "linear.conv_bias");
  check_aligned(linear.log_decay, "linear.log_decay");
  check_aligned(linear.beta, "linear.beta");
  check_aligned(linear.skip, "linear.skip");
  refuse_given(bool{layer.q}, "q", spec);
  refuse_given(bool{layer.dual_chunk.q_succ}, "dual_chunk.q_succ", spec);
  refuse_given(bool{layer.dual_chunk.q_inter}, "dual_chunk.q_inter", spec);
  refuse_keys(layer, spec);
  refuse_mla(layer.mla, spec);
  refuse_given(bool{layer.lse}, "lse", spec);
}

void validate_layer(const LayerTensors& layer, const AttentionSpec& spec, const BatchView& batch,
                    bool cached) {
  const DType dtype = activation_dtype(spec);
  const int64_t tokens = batch.tokens;
  if (spec.kind == AttentionKind::mla) {
    refuse_keys(layer, spec);
    check_argument(layer.mla.latent || !layer.mla.k_rope,
                   "mla.k_rope is given, but mla.latent is null");
  } else {
    refuse_mla(layer.mla, spec);
    check_argument(layer.k || !layer.v, "v is given, but k is null");
  }
  check_argument(layer.q || stores(layer), "q is null and there is no k to store");
  if (stores(layer) || (is_packed(spec.scope) && layer.q)) check_keys(layer, spec, tokens);
  if (cached && stores(layer)) {
    check_argument(!batch.out_slots.empty(), "out_slots is absent, storing k and v needs it");
  }
  check_rotary(layer.rotary, spec);
  if (!layer.q) return;
  const RowShape queries = {tokens, spec.q_heads, query_dim(layer, spec), spec.q_dtype};
  check_rows(layer.q, queries, "q");
  check_dual_queries(layer, spec, queries);
  check_q_scale(layer, spec, tokens);
  const int32_t out_dim = spec.mla.v_dim > 0 ? spec.mla.v_dim : cached_value_dim(spec);
  check_rows(layer.out, {tokens, spec.q_heads, out_dim, dtype}, "out");
  check_apart(layer.out, tokens, spec.q_heads, out_dim, "out");
  if (layer.mla.q_rope) {
    check_rows(layer.mla.q_rope, {tokens, spec.q_heads, spec.mla.rope_dim, dtype}, "mla.q_rope");
  }
  check_argument(!layer.lse || spec.needs_lse, "lse is given, but the spec's needs_lse is false");
  check_aligned(layer.lse.data, "lse");
  check_optional(layer.scores.sinks, spec.scores.has_sinks, "scores.sinks", "scores.has_sinks");
  check_aligned(layer.scores.sinks, "scores.sinks");
  check_optional(layer.scores.alibi_slopes, spec.scores.has_alibi, "scores.alibi_slopes",
                 "scores.has_alibi");
  check_aligned(layer.scores.alibi_slopes, "scores.alibi_slopes");
  if (spec.kind == AttentionKind::mla) check_mla_weights(layer.mla.weights, spec);
  refuse_given(layer.linear.mixed != nullptr, "linear", spec);
}

}  // namespace fovea
