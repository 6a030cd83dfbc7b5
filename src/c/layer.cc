// SPDX-License-Identifier: Apache-2.0
#include <array>

#include "c/arguments.h"
#include "c/pass.h"
#include "c/tensors.h"

namespace fovea::c {
namespace {

constexpr RowsShape kAnyRows = {kAnyExtent, kAnyExtent, kAnyExtent};

// Makes the tensors of one layer. Plan and forward refuse tensors that the kind of the layer does
// not take, so these may have any shape.
class LayerReader {
 public:
  explicit LayerReader(const LayerShape& shape) : shape_(shape), spec_(shape.spec) {}

  HeadRows rows(const DLTensor* tensor, std::string_view name, int64_t heads, int64_t dim,
                bool taken = true) const {
    return head_rows(tensor, {name, shape_.device},
                     taken ? RowsShape{shape_.tokens, heads, dim} : kAnyRows);
  }

  template <size_t n>
  const float* floats(const DLTensor* tensor, std::string_view name,
                      const int64_t (&extents)[n]) const {
    return dense_floats(tensor, {name, shape_.device}, extents);
  }

  // Returns the array of [tokens, width].
  const float* token_floats(const DLTensor* tensor, std::string_view name, int64_t width) const {
    return floats(tensor, name, {shape_.tokens, width});
  }

  int64_t query_dim(bool separate_rope) const {
    if (spec_.kind != AttentionKind::mla) return spec_.head_dim;
    const int64_t front = spec_.mla.nope_dim > 0 ? spec_.mla.nope_dim : spec_.mla.kv_lora_rank;
    return front + (separate_rope ? 0 : spec_.mla.rope_dim);
  }

  HeadRows out(const DLTensor* tensor) const {
    if (is_linear(spec_.kind)) {
      return rows(tensor, "out", spec_.linear.value_heads, spec_.linear.value_dim);
    }
    const int32_t dim = spec_.mla.v_dim > 0 ? spec_.mla.v_dim : cached_value_dim(spec_);
    return rows(tensor, "out", spec_.q_heads, dim);
  }

  QueryScale query_scale(const DLTensor* tensor) const;
  RotaryTensors rotary(const fovea_rotary_tensors& from) const;
  MlaTensors mla(const fovea_mla_tensors& from) const;
  LinearTensors linear(const fovea_linear_tensors& from) const;

 private:
  const float* log_decay(const DLTensor* tensor) const;
  // Returns an up-projection [q_heads, rows, kv_lora_rank] with any stride between heads.
  HeadRows weight(const DLTensor* tensor, std::string_view name, int64_t rows) const;

  const LayerShape& shape_;
  const AttentionSpec& spec_;
};

QueryScale LayerReader::query_scale(const DLTensor* tensor) const {
  if (tensor == nullptr) return {};
  const TensorName name{"q_scale", shape_.device};
  const TensorView view = view_tensor(*tensor, name, 2, "[tokens or 1, q_heads or 1]");
  check_type(*tensor, name.name, element_type<float>());
  check(view.shape[0] == 1 || view.shape[0] >= shape_.tokens,
        "q_scale: shape[0] is {}, must be 1 or at least {}", view.shape[0], shape_.tokens);
  check(view.shape[1] == 1 || view.shape[1] == spec_.q_heads,
        "q_scale: shape[1] is {}, must be 1 or q_heads = {}", view.shape[1], spec_.q_heads);
  return {.data = reinterpret_cast<const float*>(view.data),
          .token_stride = view.shape[0] == 1 ? 0 : view.strides[0],
          .head_stride = view.shape[1] == 1 ? 0 : view.strides[1]};
}

RotaryTensors LayerReader::rotary(const fovea_rotary_tensors& from) const {
  check_reserved(from.reserved, "rotary.reserved");
  RotaryTensors to;
  to.interleaved = to_flag(from.interleaved, "rotary.interleaved");
  to.cos = floats(from.cos, "rotary.cos", {kAnyExtent, kAnyExtent});
  to.sin = floats(from.sin, "rotary.sin", {kAnyExtent, kAnyExtent});
  const TensorName positions{"rotary.positions", shape_.device};
  const std::span<const int32_t> given = dense_array<int32_t>(from.positions, positions);
  check(given.empty() || static_cast<int64_t>(given.size()) >= shape_.tokens,
        "rotary.positions has {} elements, the batch needs {}", given.size(), shape_.tokens);
  to.positions = given.data();
  if (to.cos == nullptr || to.sin == nullptr) return to;
  check(from.cos->shape[0] == from.sin->shape[0] && from.cos->shape[1] == from.sin->shape[1],
        "rotary.sin has the shape [{}, {}], rotary.cos [{}, {}]", from.sin->shape[0],
        from.sin->shape[1], from.cos->shape[0], from.cos->shape[1]);
  check(from.cos->shape[0] <= INT32_MAX && from.cos->shape[1] <= INT32_MAX / 2,
        "rotary.cos has the shape [{}, {}], which is too large", from.cos->shape[0],
        from.cos->shape[1]);
  to.max_positions = static_cast<int32_t>(from.cos->shape[0]);
  to.rotary_dim = static_cast<int32_t>(2 * from.cos->shape[1]);
  return to;
}

HeadRows LayerReader::weight(const DLTensor* tensor, std::string_view name, int64_t rows) const {
  const bool taken = spec_.kind == AttentionKind::mla && spec_.mla.nope_dim > 0;
  const RowsShape wanted =
      taken ? RowsShape{spec_.q_heads, rows, spec_.mla.kv_lora_rank} : kAnyRows;
  const HeadRows weight = head_rows(tensor, {name, shape_.device}, wanted);
  check(!weight || rows <= 1 || weight.head_stride == spec_.mla.kv_lora_rank || !taken,
        "{}: strides[1] is {}, must be {}: a head is dense", name, weight.head_stride,
        spec_.mla.kv_lora_rank);
  return weight;
}

MlaTensors LayerReader::mla(const fovea_mla_tensors& from) const {
  const bool taken = spec_.kind == AttentionKind::mla;
  MlaTensors to;
  to.latent = rows(from.latent, "mla.latent", 1, spec_.mla.kv_lora_rank, taken);
  to.k_rope = rows(from.k_rope, "mla.k_rope", 1, spec_.mla.rope_dim, taken);
  to.q_rope = rows(from.q_rope, "mla.q_rope", spec_.q_heads, spec_.mla.rope_dim, taken);
  const HeadRows w_uk = weight(from.w_uk, "mla.w_uk", spec_.mla.nope_dim);
  const HeadRows w_uv = weight(from.w_uv, "mla.w_uv", spec_.mla.v_dim);
  check(!w_uk || !w_uv || w_uk.dtype == w_uv.dtype, "mla.w_uv is {}, mla.w_uk is {}",
        dtype_name(w_uv.dtype), dtype_name(w_uk.dtype));
  to.weights = {.dtype = w_uk ? w_uk.dtype : w_uv.dtype,
                .w_uk = w_uk.data,
                .w_uv = w_uv.data,
                .w_uk_head_stride = w_uk.token_stride,
                .w_uv_head_stride = w_uv.token_stride};
  return to;
}

const float* LayerReader::log_decay(const DLTensor* tensor) const {
  constexpr std::string_view kName = "linear.log_decay";
  const LinearSpec& spec = spec_.linear;
  if (spec_.kind == AttentionKind::lightning) return floats(tensor, kName, {spec.value_heads});
  if (spec_.kind == AttentionKind::mamba1) {
    return floats(tensor, kName, {spec.value_heads, spec.key_dim});
  }
  if (spec_.kind == AttentionKind::kda) {
    return floats(tensor, kName, {shape_.tokens, spec.value_heads, spec.key_dim});
  }
  return token_floats(tensor, kName, spec.value_heads);
}

LinearTensors LayerReader::linear(const fovea_linear_tensors& from) const {
  const LinearSpec& spec = spec_.linear;
  const int64_t channels = conv_dim_of(spec_);
  LinearTensors to;
  to.mixed = token_floats(from.mixed, "linear.mixed",
                          from.conv_weight != nullptr ? channels : spec.conv_dim());
  to.conv_weight = floats(from.conv_weight, "linear.conv_weight", {channels, spec.conv_width});
  to.conv_bias = floats(from.conv_bias, "linear.conv_bias", {channels});
  to.log_decay = log_decay(from.log_decay);
  to.beta = token_floats(from.beta, "linear.beta", spec.value_heads);
  to.skip = floats(from.skip, "linear.skip", {spec.value_heads});
  to.l2_normalise_qk = to_flag(from.l2_normalise_qk, "linear.l2_normalise_qk");
  to.plain_conv = to_flag(from.plain_conv, "linear.plain_conv");
  return to;
}

}  // namespace

LayerTensors to_layer(const fovea_layer_tensors& layer, const LayerShape& shape) {
  const AttentionSpec& spec = shape.spec;
  const LayerReader read(shape);
  const bool softmax = !is_linear(spec.kind), heads = spec.kind == AttentionKind::mha;
  const int64_t query_dim = read.query_dim(layer.mla.q_rope != nullptr);
  check_reserved(layer.reserved, "layer.reserved");
  LayerTensors to;
  to.layer = layer.layer;
  to.q = read.rows(layer.q, "q", spec.q_heads, query_dim, softmax);
  to.k = read.rows(layer.k, "k", spec.kv_heads, spec.head_dim, heads);
  to.v = read.rows(layer.v, "v", spec.kv_heads, spec.head_dim_v, heads);
  to.out = read.out(layer.out);
  to.lse = NaturalLse(
      const_cast<float*>(read.token_floats(layer.lse, "lse", softmax ? spec.q_heads : kAnyExtent)));
  to.q_scale = read.query_scale(layer.q_scale);
  to.save_kv = to_flag(layer.save_kv, "save_kv");
  to.scores = {.sinks = read.floats(layer.sinks, "sinks", {spec.q_heads}),
               .alibi_slopes = read.floats(layer.alibi_slopes, "alibi_slopes", {spec.q_heads})};
  to.rotary = read.rotary(layer.rotary);
  to.dual_chunk = {
      .q_succ = read.rows(layer.dual_q_succ, "dual_q_succ", spec.q_heads, query_dim, softmax),
      .q_inter = read.rows(layer.dual_q_inter, "dual_q_inter", spec.q_heads, query_dim, softmax)};
  to.mla = read.mla(layer.mla);
  to.linear = read.linear(layer.linear);
  return to;
}

}  // namespace fovea::c

fovea_status fovea_layer_tensors_init(fovea_layer_tensors* layer, size_t struct_size) {
  return fovea::c::init_struct(layer, struct_size, fovea::c::kDefaultLayer, "layer");
}
