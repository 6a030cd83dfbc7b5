// SPDX-License-Identifier: Apache-2.0
#include "attention/validate_layer.h"

#include <string_view>
#include <utility>

#include "attention/names.h"
#include "core/check.h"

namespace fovea {
namespace {

void check_rows(const HeadRows& rows, DType dtype, std::string_view name) {
  check_argument(rows.data != nullptr, "{} is null", name);
  check_argument(rows.dtype == dtype, "{} is {}, the spec's q_dtype asks for {}", name,
                 dtype_name(rows.dtype), dtype_name(dtype));
  check_argument(reinterpret_cast<uintptr_t>(rows.data) % dtype_bytes(dtype) == 0,
                 "{} is at {}, must be aligned to {} bytes", name, rows.data, dtype_bytes(dtype));
}

void check_optional(const void* given, bool wanted, std::string_view name, std::string_view flag) {
  check_argument((given != nullptr) == wanted, "{} is {}, but the spec's {} is {}", name,
                 given != nullptr ? "given" : "null", flag, wanted);
}

// Rows that are written share no memory.
void check_apart(const HeadRows& rows, int64_t tokens, int64_t heads, int64_t dim,
                 std::string_view name) {
  int64_t inner = rows.head_stride, inner_rows = heads;
  int64_t outer = rows.token_stride, outer_rows = tokens;
  if (inner > outer) {
    std::swap(inner, outer);
    std::swap(inner_rows, outer_rows);
  }
  const bool apart =
      (inner_rows <= 1 || inner >= dim) &&
      (outer_rows <= 1 || outer >= (inner_rows > 1 ? (inner_rows - 1) * inner : 0) + dim);
  check_argument(apart, "{} has strides of {} a token and {} a head: rows of {} values overlap",
                 name, rows.token_stride, rows.head_stride, dim);
}

void check_rotary(const RotaryTensors& rotary, const AttentionSpec& spec) {
  check_optional(rotary.cos, spec.has_rope, "rotary.cos", "has_rope");
  if (!spec.has_rope) return;
  check_argument(rotary.sin != nullptr, "rotary.sin is null");
  check_argument(rotary.positions != nullptr, "rotary.positions is null");
  check_argument(rotary.max_positions > 0, "rotary.max_positions is {}, must be positive",
                 rotary.max_positions);
  check_argument(!spec.dual_chunk || rotary.max_positions > spec.dual_chunk.chunk_size,
                 "rotary.max_positions is {}, must be above the dual_chunk.chunk_size of {}",
                 rotary.max_positions, spec.dual_chunk.chunk_size);
  const int32_t most = spec.kind == AttentionKind::mla ? spec.rope_dim : spec.head_dim;
  check_argument(rotary.rotary_dim > 0 && rotary.rotary_dim % 2 == 0 && rotary.rotary_dim <= most,
                 "rotary.rotary_dim is {}, must be even and in [2, {}]", rotary.rotary_dim, most);
}

void check_mla_weights(const MlaWeights& weights, const AttentionSpec& spec) {
  const bool given = weights.w_uk != nullptr && weights.w_uv != nullptr;
  const bool none = weights.w_uk == nullptr && weights.w_uv == nullptr;
  check_argument(spec.nope_dim > 0 ? given : none, "mla_weights {}, but the spec's nope_dim is {}",
                 given  ? "are given"
                 : none ? "are null"
                        : "are half given",
                 spec.nope_dim);
}

// The queries of dual_chunk that has_rope would make of q.
void check_dual_queries(const LayerTensors& layer, const AttentionSpec& spec) {
  const bool wanted = spec.dual_chunk && !spec.has_rope;
  for (const auto& [name, rows] : {std::pair{"q_succ", layer.q_succ}, {"q_inter", layer.q_inter}}) {
    if (wanted) {
      check_rows(rows, spec.q_dtype, name);
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

}  // namespace

void validate_linear_layer(const LayerTensors& layer, const AttentionSpec& spec,
                           const BatchView& batch) {
  const LinearTensors& linear = layer.linear;
  check_argument(linear.mixed != nullptr, "linear.mixed is null");
  check_argument(linear.log_decay != nullptr, "linear.log_decay is null");
  check_argument(linear.beta != nullptr, "linear.beta is null");
  check_argument((linear.conv_weight != nullptr) == (spec.conv_width > 0),
                 "linear.conv_weight is {}, but the spec's conv_width is {}",
                 linear.conv_weight != nullptr ? "given" : "null", spec.conv_width);
  check_argument(
      layer.out.data != nullptr && layer.out.dtype == DType::f32 &&
          layer.out.head_stride == spec.head_dim_v,
      "out is {} with a head stride of {}, must be f32 with a head stride of head_dim_v = {}",
      layer.out.data == nullptr ? "null" : dtype_name(layer.out.dtype), layer.out.head_stride,
      spec.head_dim_v);
  check_apart(layer.out, batch.tokens, spec.kv_heads, spec.head_dim_v, "out");
  refuse_given(bool{layer.q}, "q", spec);
  refuse_given(bool{layer.q_rope}, "q_rope", spec);
  refuse_given(bool{layer.q_succ}, "q_succ", spec);
  refuse_given(bool{layer.q_inter}, "q_inter", spec);
  refuse_given(bool{layer.k}, "k", spec);
  refuse_given(bool{layer.v}, "v", spec);
  refuse_given(bool{layer.lse}, "lse", spec);
  if (spec.kind != AttentionKind::mamba2) refuse_given(linear.skip != nullptr, "linear.skip", spec);
}

void validate_layer(const LayerTensors& layer, const AttentionSpec& spec, const BatchView& batch,
                    bool cached) {
  const DType dtype = activation_dtype(spec);
  check_argument(layer.q || stores(layer), "q is null and there is no k to store");
  if (stores(layer) || (is_packed(spec.scope) && layer.q)) {
    check_rows(layer.k, dtype, "k");
    if (spec.kind != AttentionKind::mla || spec.rope_dim > 0) check_rows(layer.v, dtype, "v");
  }
  if (cached && stores(layer)) {
    check_argument(batch.out_slots != nullptr, "out_slots is null, storing k and v needs it");
  }
  check_rotary(layer.rotary, spec);
  if (!layer.q) return;
  check_rows(layer.q, spec.q_dtype, "q");
  check_dual_queries(layer, spec);
  check_argument(layer.q_scale == nullptr || is_fp8(spec.q_dtype),
                 "q_scale is given, but the spec's q_dtype is {}", dtype_name(spec.q_dtype));
  check_rows(layer.out, dtype, "out");
  check_apart(layer.out, batch.tokens, spec.q_heads, spec.v_dim > 0 ? spec.v_dim : spec.head_dim_v,
              "out");
  if (spec.kind != AttentionKind::mla) refuse_given(bool{layer.q_rope}, "q_rope", spec);
  if (layer.q_rope) check_rows(layer.q_rope, dtype, "q_rope");
  check_argument(!layer.lse || spec.needs_lse, "lse is given, but the spec's needs_lse is false");
  check_optional(layer.sinks, spec.has_sinks, "sinks", "has_sinks");
  check_optional(layer.alibi_slopes, spec.has_alibi, "alibi_slopes", "has_alibi");
  check_mla_weights(layer.mla_weights, spec);
  refuse_given(layer.linear.mixed != nullptr, "linear", spec);
}

}  // namespace fovea
