// SPDX-License-Identifier: Apache-2.0
#include "python/bindings/tensors.h"

#include "python/bindings/devices.h"
#include "python/bindings/keywords.h"
#include "python/bindings/module.h"
#include "python/bindings/values.h"

namespace fovea::python {
namespace {

enum Argument : size_t {
  kQ,
  kK,
  kV,
  kOut,
  kLse,
  kQScale,
  kSaveKv,
  kSinks,
  kAlibiSlopes,
  kRope,
  kQSucc,
  kQInter,
  kLatent,
  kKRope,
  kQRope,
  kWUk,
  kWUv,
  kMixed,
  kConvWeight,
  kConvBias,
  kLogDecay,
  kBeta,
  kSkip,
  kL2NormaliseQk,
  kPlainConv,
  kStream,
  kArguments
};

constexpr const char* kNames[kArguments] = {"q",           "k",         "v",
                                            "out",         "lse",       "q_scale",
                                            "save_kv",     "sinks",     "alibi_slopes",
                                            "rope",        "q_succ",    "q_inter",
                                            "latent",      "k_rope",    "q_rope",
                                            "w_uk",        "w_uv",      "mixed",
                                            "conv_weight", "conv_bias", "log_decay",
                                            "beta",        "skip",      "l2_normalise_qk",
                                            "plain_conv",  "stream"};

// The form of an array [tokens, heads, dim].
struct RowShape {
  int64_t heads, dim;
  DType dtype;
};

// The arguments in the order of their names, an invalid handle for those not given or None.
using Arguments = std::array<nb::handle, kArguments>;

class LayerReader {
 public:
  LayerReader(const Arguments& arguments, const LayerShape& shape, LayerInput& input, bool keep)
      : spec_(shape.spec),
        device_(shape.device),
        input_(input),
        keep_(keep),
        arguments_(arguments) {
    if (!arguments_[kStream].is_valid()) return;
    const Stream stream = stream_from(arguments_[kStream], device_, nullptr);
    if (stream != nullptr) dl_stream_ = static_cast<int64_t>(reinterpret_cast<intptr_t>(stream));
  }

  nb::handle stream() const { return arguments_[kStream]; }

  void read() {
    LayerTensors& layer = input_.tensors;
    if (is_linear(spec_.kind)) {
      read_linear(layer.linear);
      layer.out = rows(kOut, {spec_.linear.value_heads, spec_.linear.value_dim, DType::f32}, true);
      refuse({kQ, kK, kV, kLse, kQScale, kLatent, kKRope, kQRope, kWUk, kWUv, kQSucc, kQInter});
      read_scores(layer);
      return;
    }
    refuse({kMixed, kConvWeight, kConvBias, kLogDecay, kBeta, kSkip});
    const DType dtype = activation_dtype(spec_);
    if (spec_.kind == AttentionKind::mla) {
      read_mla(layer, dtype);
    } else {
      refuse({kLatent, kKRope, kQRope, kWUk, kWUv});
      const RowShape queries = {spec_.q_heads, spec_.head_dim, spec_.q_dtype};
      layer.q = rows(kQ, queries, spec_.has_rope);
      layer.k = rows(kK, {spec_.kv_heads, spec_.head_dim, dtype}, false);
      layer.v = rows(kV, {spec_.kv_heads, spec_.head_dim_v, dtype}, false);
      layer.out = rows(kOut, {spec_.q_heads, spec_.head_dim_v, dtype}, true);
      layer.dual_chunk = {rows(kQSucc, queries, false), rows(kQInter, queries, false)};
    }
    if (arguments_[kLse].is_valid()) read_lse(layer);
    if (arguments_[kQScale].is_valid()) read_q_scale(layer.q_scale);
    read_scores(layer);
  }

 private:
  // Throws if an argument is given that layers of this kind do not have.
  void refuse(std::initializer_list<Argument> names) const {
    for (const Argument name : names) {
      if (!arguments_[name].is_valid()) continue;
      fail(ErrorCode::invalid_argument, "{} is given, layers of kind {} do not take it",
           kNames[name], enumerators<AttentionKind>()[static_cast<size_t>(spec_.kind)].text);
    }
  }

  void take(Array& array, nb::handle source) {
    array.check_device(device_);
    if (input_.api == nullptr) input_.api = array.exchange_api();
    input_.keeper.keep(array);
    if (keep_) input_.keeper.keep(source);
  }

  void limit_rows(const Array& array) {
    if (array.extent(0) >= input_.rows) return;
    input_.rows = array.extent(0);
    input_.shortest = array.name();
  }

  HeadRows rows(Argument name, const RowShape& shape, bool writable) {
    const nb::handle source = arguments_[name];
    if (!source.is_valid()) return {};
    Array array(source, kNames[name], dl_stream_);
    // A single head needs no axis.
    const bool flat = array.dimensions() == 2 && shape.heads == 1;
    const int32_t last = flat ? 1 : 2;
    if (array.dimensions() != last + 1 || array.extent(last) != shape.dim ||
        (!flat && array.extent(1) != shape.heads)) {
      fail(ErrorCode::invalid_argument, "{} has shape {}, must be [tokens, {}, {}]", kNames[name],
           array.shape_text(), shape.heads, shape.dim);
    }
    array.check_dtype(shape.dtype);
    array.check_last_axis();
    if (writable) array.check_writable();
    take(array, source);
    limit_rows(array);
    // The strides of axes of one element are free; backends check them.
    const int64_t dense = shape.heads * shape.dim;
    return {array.data(), shape.dtype, array.extent(0) > 1 ? array.stride(0) : dense,
            flat || shape.heads == 1 ? shape.dim : array.stride(1)};
  }

  // Reads a dense f32 array of the given shape, whose first extent -1 stands for the tokens.
  const float* floats(Argument name, std::initializer_list<int64_t> shape, const char* text,
                      bool writable = false) {
    const nb::handle source = arguments_[name];
    if (!source.is_valid()) return nullptr;
    Array array(source, kNames[name], dl_stream_);
    array.check_dimensions(static_cast<int32_t>(shape.size()), text);
    int32_t axis = 0;
    for (const int64_t extent : shape) {
      if (extent < 0) {
        limit_rows(array);
      } else {
        array.check_extent(axis, extent, text);
      }
      ++axis;
    }
    array.check_dtype(DType::f32);
    array.check_dense();
    if (writable) array.check_writable();
    take(array, source);
    return reinterpret_cast<const float*>(array.data());
  }

  void read_lse(LayerTensors& layer) {
    const float* values = floats(kLse, {-1, spec_.q_heads}, "[tokens, q_heads]", true);
    layer.lse = NaturalLse(const_cast<float*>(values));
  }

  void read_q_scale(QueryScale& scale) {
    Array array(arguments_[kQScale], kNames[kQScale], dl_stream_);
    const int32_t axes = array.dimensions();
    const bool heads = axes < 2 || array.extent(1) == 1 || array.extent(1) == spec_.q_heads;
    check_argument(axes <= 2 && heads && array.elements() > 0,
                   "q_scale has shape {}, must be [1], [tokens] or [tokens or 1, {} or 1]",
                   array.shape_text(), spec_.q_heads);
    array.check_dtype(DType::f32);
    take(array, arguments_[kQScale]);
    scale.data = reinterpret_cast<const float*>(array.data());
    if (axes > 0 && array.extent(0) > 1) limit_rows(array);
    scale.token_stride = axes > 0 ? array.stride(0) : 0;
    scale.head_stride = axes > 1 ? array.stride(1) : 0;
  }

  void read_scores(LayerTensors& layer) {
    if (arguments_[kSaveKv].is_valid()) {
      layer.save_kv = bool_from(arguments_[kSaveKv], kNames[kSaveKv]);
    }
    layer.scores.sinks = floats(kSinks, {spec_.q_heads}, "[q_heads]");
    layer.scores.alibi_slopes = floats(kAlibiSlopes, {spec_.q_heads}, "[q_heads]");
    if (!arguments_[kRope].is_valid()) return;
    const Rotary* rotary = nullptr;
    check_argument(nb::try_cast(arguments_[kRope], rotary) && rotary != nullptr,
                   "rope is {}, must be RotaryTensors", type_text(arguments_[kRope]));
    check_argument(rotary->device == device_, "rope is on {}, must be on {}",
                   device_name(rotary->device), device_name(device_));
    if (rotary->rows < input_.rows) {
      input_.rows = rotary->rows;
      input_.shortest = "rope.positions";
    }
    layer.rotary = rotary->tensors;
    if (keep_) input_.keeper.keep(arguments_[kRope]);
  }

  void read_mla(LayerTensors& layer, DType dtype) {
    const MlaSpec& mla = spec_.mla;
    refuse({kK, kV, kQSucc, kQInter});
    const int64_t own = mla.nope_dim > 0 ? mla.nope_dim : mla.kv_lora_rank;
    const int64_t rotary = arguments_[kQRope].is_valid() ? 0 : mla.rope_dim;
    layer.q = rows(kQ, {spec_.q_heads, own + rotary, spec_.q_dtype}, spec_.has_rope);
    const int64_t out = mla.v_dim > 0 ? mla.v_dim : mla.kv_lora_rank;
    layer.out = rows(kOut, {spec_.q_heads, out, dtype}, true);
    layer.mla.latent = rows(kLatent, {1, mla.kv_lora_rank, dtype}, false);
    layer.mla.k_rope = rows(kKRope, {1, mla.rope_dim, dtype}, false);
    layer.mla.q_rope = rows(kQRope, {spec_.q_heads, mla.rope_dim, dtype}, spec_.has_rope);
    MlaWeights& weights = layer.mla.weights;
    weights.w_uk = read_weights(kWUk, mla.nope_dim, weights.w_uk_head_stride, weights.dtype);
    weights.w_uv = read_weights(kWUv, mla.v_dim, weights.w_uv_head_stride, weights.dtype);
  }

  // The dtype of w_uk is free; that of w_uv must equal it.
  const void* read_weights(Argument name, int64_t rows, int64_t& head_stride, DType& dtype) {
    const nb::handle source = arguments_[name];
    if (!source.is_valid()) return nullptr;
    Array array(source, kNames[name], dl_stream_);
    const std::string shape =
        fmt::format("[{}, {}, {}]", spec_.q_heads, rows, spec_.mla.kv_lora_rank);
    array.check_dimensions(3, shape.c_str());
    array.check_extent(0, spec_.q_heads, shape.c_str());
    array.check_extent(1, rows, shape.c_str());
    array.check_extent(2, spec_.mla.kv_lora_rank, shape.c_str());
    array.check_last_axis();
    check_argument(rows <= 1 || array.stride(1) == spec_.mla.kv_lora_rank,
                   "{} has a stride of {} elements along axis 1, must be {}: heads are dense",
                   kNames[name], array.stride(1), spec_.mla.kv_lora_rank);
    if (name == kWUk || !arguments_[kWUk].is_valid()) {
      dtype = activation_dtype(spec_);
      for (const DType known : {DType::f32, DType::bf16, DType::f16}) {
        if (array.dtype() == dl_type(known)) dtype = known;
      }
    }
    array.check_dtype(dtype);
    take(array, source);
    head_stride = array.extent(0) > 1 ? array.stride(0) : 0;
    return array.data();
  }

  const float* read_log_decay() {
    const LinearSpec& spec = spec_.linear;
    if (spec_.kind == AttentionKind::lightning) {
      return floats(kLogDecay, {spec.value_heads}, "[value_heads]");
    }
    if (spec_.kind == AttentionKind::mamba1) {
      return floats(kLogDecay, {spec.value_heads, spec.key_dim}, "[value_heads, key_dim]");
    }
    if (spec_.kind == AttentionKind::kda) {
      return floats(kLogDecay, {-1, spec.value_heads, spec.key_dim},
                    "[tokens, value_heads, key_dim]");
    }
    return floats(kLogDecay, {-1, spec.value_heads}, "[tokens, value_heads]");
  }

  void read_linear(LinearTensors& linear) {
    const LinearSpec& spec = spec_.linear;
    const int64_t channels = conv_dim_of(spec_);
    const bool convolves = arguments_[kConvWeight].is_valid();
    linear.mixed =
        floats(kMixed, {-1, convolves ? channels : spec.conv_dim()}, "[tokens, conv_dim]");
    linear.conv_weight = floats(kConvWeight, {channels, spec.conv_width}, "[conv_dim, conv_width]");
    linear.conv_bias = floats(kConvBias, {channels}, "[conv_dim]");
    linear.log_decay = read_log_decay();
    linear.beta = floats(kBeta, {-1, spec.value_heads}, "[tokens, value_heads]");
    linear.skip = floats(kSkip, {spec.value_heads}, "[value_heads]");
    if (arguments_[kL2NormaliseQk].is_valid()) {
      linear.l2_normalise_qk = bool_from(arguments_[kL2NormaliseQk], kNames[kL2NormaliseQk]);
    }
    if (arguments_[kPlainConv].is_valid()) {
      linear.plain_conv = bool_from(arguments_[kPlainConv], kNames[kPlainConv]);
    }
  }

  const AttentionSpec& spec_;
  Device device_;
  LayerInput& input_;
  bool keep_;
  int64_t dl_stream_ = 1;  // DLPack's number of the default stream
  const Arguments& arguments_;
};

Rotary read_rotary(nb::handle cos, nb::handle sin, nb::handle positions, nb::handle interleaved) {
  Rotary rotary;
  Array cos_array(cos, "cos"), sin_array(sin, "sin"), position_array(positions, "positions");
  rotary.device = device_of(cos_array.device());
  for (Array* table : {&cos_array, &sin_array}) {
    table->check_dimensions(2, "[max_positions, rotary_dim / 2]");
    table->check_extent(0, cos_array.extent(0), "of cos's shape");
    table->check_extent(1, cos_array.extent(1), "of cos's shape");
    table->check_dtype(DType::f32);
    table->check_dense();
    table->check_device(rotary.device);
    rotary.keeper.keep(*table);
  }
  position_array.check_dimensions(1, "[tokens]");
  position_array.check_dtype(DType::i32);
  position_array.check_dense();
  position_array.check_device(rotary.device);
  rotary.keeper.keep(position_array);
  for (const nb::handle source : {cos, sin, positions}) rotary.keeper.keep(source);
  rotary.rows = position_array.extent(0);
  rotary.tensors = {.cos = reinterpret_cast<const float*>(cos_array.data()),
                    .sin = reinterpret_cast<const float*>(sin_array.data()),
                    .max_positions = static_cast<int32_t>(cos_array.extent(0)),
                    .rotary_dim = static_cast<int32_t>(2 * cos_array.extent(1)),
                    .interleaved = bool_from(interleaved, "interleaved"),
                    .positions = reinterpret_cast<const int32_t*>(position_array.data())};
  return rotary;
}

}  // namespace

void read_layer(const nb::kwargs& arguments, const LayerShape& shape, LayerInput& input, bool keep,
                nb::handle* stream) {
  static const Keywords<kArguments> keywords(kNames);
  const Arguments values = keywords.read(arguments, "forward");
  LayerReader reader(values, shape, input, keep);
  check_argument(stream != nullptr || !reader.stream().is_valid(),
                 "stream is given, bind() does not take it: give it to BoundLayer.forward()");
  if (stream != nullptr) *stream = reader.stream();
  reader.read();
}

void read_rows(const LayerRows& rows, const LayerShape& shape, LayerInput& input) {
  Arguments values;
  if (is_given(rows.q)) values[kQ] = rows.q;
  if (is_given(rows.k)) values[kK] = rows.k;
  if (is_given(rows.v)) values[kV] = rows.v;
  if (is_given(rows.out)) values[kOut] = rows.out;
  LayerReader(values, shape, input, false).read();
}

void bind_tensors(nb::module_& module) {
  nb::class_<Rotary>(module, "RotaryTensors",
                     "Rotary positions of q and k, for specs with has_rope. cos and sin: f32 "
                     "[max_positions, rotary_dim / 2], dense. positions: int32 [tokens]. "
                     "interleaved: pairs (2i, 2i + 1), else (i, i + rotary_dim / 2). The object "
                     "keeps references to the arrays.",
                     nb::is_final())
      .def(
          "__init__",
          [](Rotary* self, nb::handle cos, nb::handle sin, nb::handle positions,
             nb::handle interleaved) {
            new (self) Rotary(read_rotary(cos, sin, positions, interleaved));
          },
          nb::kw_only(), nb::arg("cos"), nb::arg("sin"), nb::arg("positions"),
          nb::arg("interleaved") = false,
          nb::sig("def __init__(self, *, cos: Array, sin: Array, positions: Array, interleaved: "
                  "bool = False) -> None"))
      .def_prop_ro("max_positions", [](const Rotary& self) { return self.tensors.max_positions; })
      .def_prop_ro("rotary_dim", [](const Rotary& self) { return self.tensors.rotary_dim; })
      .def_prop_ro("interleaved", [](const Rotary& self) { return self.tensors.interleaved; });
}

}  // namespace fovea::python
