// SPDX-License-Identifier: Apache-2.0
// Specs of layers and caches, and limits of batches.
#include "fovea/attention_spec.h"
#include "fovea/batch.h"
#include "fovea/kv_cache.h"
#include "python/bindings/module.h"
#include "python/bindings/value_type.h"

namespace fovea {

// The library compares none of these; Python does.
static bool operator==(const KvCacheSpec& a, const KvCacheSpec& b) {
  return a.layout == b.layout && a.order == b.order && a.dtype == b.dtype && a.scale == b.scale &&
         a.layers == b.layers && a.kv_heads == b.kv_heads && a.head_dim == b.head_dim &&
         a.head_dim_v == b.head_dim_v && a.page_size == b.page_size && a.window == b.window;
}
static bool operator==(const StateCacheSpec& a, const StateCacheSpec& b) {
  return a.layers == b.layers && a.conv_dim == b.conv_dim && a.conv_width == b.conv_width &&
         a.heads == b.heads && a.rows == b.rows && a.columns == b.columns && a.dtype == b.dtype &&
         a.max_drafts == b.max_drafts && a.draft_inputs == b.draft_inputs;
}
static bool operator==(const BatchLimits& a, const BatchLimits& b) {
  return a.max_requests == b.max_requests && a.max_tokens == b.max_tokens &&
         a.max_q_len == b.max_q_len && a.max_kv_len == b.max_kv_len &&
         a.max_encoder_len == b.max_encoder_len && a.prefix_levels == b.prefix_levels &&
         a.min_prefix_savings == b.min_prefix_savings && a.workspace_budget == b.workspace_budget;
}

}  // namespace fovea

namespace fovea::python {

template <>
std::span<const Field<DualChunk>> fields_of<DualChunk>() {
  static constexpr Field<DualChunk> table[] = {field<&DualChunk::chunk_size>("chunk_size"),
                                               field<&DualChunk::local_size>("local_size")};
  return table;
}

template <>
std::span<const Field<ScoreSpec>> fields_of<ScoreSpec>() {
  static constexpr Field<ScoreSpec> table[] = {
      field<&ScoreSpec::softmax_scale>("softmax_scale"), field<&ScoreSpec::logit_cap>("logit_cap"),
      field<&ScoreSpec::has_sinks>("has_sinks"), field<&ScoreSpec::has_alibi>("has_alibi")};
  return table;
}

template <>
std::span<const Field<MlaSpec>> fields_of<MlaSpec>() {
  static constexpr Field<MlaSpec> table[] = {
      field<&MlaSpec::kv_lora_rank>("kv_lora_rank"), field<&MlaSpec::rope_dim>("rope_dim"),
      field<&MlaSpec::nope_dim>("nope_dim"), field<&MlaSpec::v_dim>("v_dim")};
  return table;
}

template <>
std::span<const Field<LinearSpec>> fields_of<LinearSpec>() {
  static constexpr Field<LinearSpec> table[] = {
      field<&LinearSpec::key_heads>("key_heads"), field<&LinearSpec::value_heads>("value_heads"),
      field<&LinearSpec::key_dim>("key_dim"), field<&LinearSpec::value_dim>("value_dim"),
      field<&LinearSpec::conv_width>("conv_width")};
  return table;
}

template <>
std::span<const Field<AttentionSpec>> fields_of<AttentionSpec>() {
  using Spec = AttentionSpec;
  static constexpr Field<Spec> table[] = {field<&Spec::kind>("kind"),
                                          field<&Spec::scope>("scope"),
                                          field<&Spec::mask>("mask"),
                                          field<&Spec::q_heads>("q_heads"),
                                          field<&Spec::kv_heads>("kv_heads"),
                                          field<&Spec::head_dim>("head_dim"),
                                          field<&Spec::head_dim_v>("head_dim_v"),
                                          field<&Spec::q_dtype>("q_dtype"),
                                          field<&Spec::window>("window"),
                                          field<&Spec::chunk>("chunk"),
                                          field<&Spec::dual_chunk>("dual_chunk"),
                                          field<&Spec::has_rope>("has_rope"),
                                          field<&Spec::needs_lse>("needs_lse"),
                                          field<&Spec::batch_invariant>("batch_invariant"),
                                          field<&Spec::scores>("scores"),
                                          field<&Spec::mla>("mla"),
                                          field<&Spec::linear>("linear")};
  return table;
}

template <>
std::span<const Field<KvCacheSpec>> fields_of<KvCacheSpec>() {
  using Spec = KvCacheSpec;
  static constexpr Field<Spec> table[] = {
      field<&Spec::layout>("layout"),       field<&Spec::order>("order"),
      field<&Spec::dtype>("dtype"),         field<&Spec::scale>("scale"),
      field<&Spec::layers>("layers"),       field<&Spec::kv_heads>("kv_heads"),
      field<&Spec::head_dim>("head_dim"),   field<&Spec::head_dim_v>("head_dim_v"),
      field<&Spec::page_size>("page_size"), field<&Spec::window>("window")};
  return table;
}

template <>
std::span<const Field<StateCacheSpec>> fields_of<StateCacheSpec>() {
  using Spec = StateCacheSpec;
  static constexpr Field<Spec> table[] = {field<&Spec::layers>("layers"),
                                          field<&Spec::conv_dim>("conv_dim"),
                                          field<&Spec::conv_width>("conv_width"),
                                          field<&Spec::heads>("heads"),
                                          field<&Spec::rows>("rows"),
                                          field<&Spec::columns>("columns"),
                                          field<&Spec::dtype>("dtype"),
                                          field<&Spec::max_drafts>("max_drafts"),
                                          field<&Spec::draft_inputs>("draft_inputs")};
  return table;
}

template <>
std::span<const Field<BatchLimits>> fields_of<BatchLimits>() {
  using Limits = BatchLimits;
  static constexpr Field<Limits> table[] = {
      field<&Limits::max_requests>("max_requests"),
      field<&Limits::max_tokens>("max_tokens"),
      field<&Limits::max_q_len>("max_q_len"),
      field<&Limits::max_kv_len>("max_kv_len"),
      field<&Limits::max_encoder_len>("max_encoder_len"),
      field<&Limits::prefix_levels>("prefix_levels"),
      field<&Limits::min_prefix_savings>("min_prefix_savings"),
      field<&Limits::workspace_budget>("workspace_budget")};
  return table;
}

namespace {

bool gives(const nb::kwargs& arguments, const char* name) {
  return arguments.contains(name) && !nb::object(arguments[name]).is_none();
}

}  // namespace

template <>
void complete<AttentionSpec>(AttentionSpec& spec, const nb::kwargs& arguments) {
  if (!gives(arguments, "head_dim_v")) spec.head_dim_v = spec.head_dim;
}

template <>
void complete<KvCacheSpec>(KvCacheSpec& spec, const nb::kwargs& arguments) {
  if (!gives(arguments, "layers")) spec.layers = 1;
  if (spec.layout == KvLayout::mha && !gives(arguments, "head_dim_v")) {
    spec.head_dim_v = spec.head_dim;
  }
}

template <>
void complete<StateCacheSpec>(StateCacheSpec& spec, const nb::kwargs& arguments) {
  if (!gives(arguments, "layers")) spec.layers = 1;
}

void bind_specs(nb::module_& module) {
  bind_value_type<DualChunk>(
      module, "DualChunk",
      "def __init__(self, *, chunk_size: int = 0, local_size: int = 0) -> None",
      "Dual chunk attention; chunk_size 0 means off.")
      .def_prop_ro("length", &DualChunk::length);
  bind_value_type<ScoreSpec>(
      module, "ScoreSpec",
      "def __init__(self, *, softmax_scale: float = 0, logit_cap: float = 0, has_sinks: bool = "
      "False, has_alibi: bool = False) -> None",
      "How scores are made of products of q and k. softmax_scale 0 means 1 / sqrt(width of k).");
  bind_value_type<MlaSpec>(
      module, "MlaSpec",
      "def __init__(self, *, kv_lora_rank: int = 0, rope_dim: int = 0, nope_dim: int = 0, v_dim: "
      "int = 0) -> None",
      "Widths of multi-head latent attention. nope_dim 0 means that q arrives absorbed.")
      .def_prop_ro("row_dim", &MlaSpec::row_dim);
  bind_value_type<LinearSpec>(
      module, "LinearSpec",
      "def __init__(self, *, key_heads: int = 0, value_heads: int = 0, key_dim: int = 0, "
      "value_dim: int = 0, conv_width: int = 0) -> None",
      "Heads and widths of a linear layer. Its state is [value_heads, value_dim, key_dim].")
      .def_prop_ro("conv_dim", &LinearSpec::conv_dim);
  bind_value_type<AttentionSpec>(
      module, "AttentionSpec",
      "def __init__(self, *, kind: AttentionKind | str = 'mha', scope: AttentionScope | str = "
      "'decoder', mask: MaskKind | str = 'none', q_heads: int = 0, kv_heads: int = 0, head_dim: "
      "int = 0, head_dim_v: int | None = None, q_dtype: DType | str = 'fp32', window: int = 0, "
      "chunk: int = 0, dual_chunk: DualChunk = ..., has_rope: bool = False, needs_lse: bool = "
      "False, batch_invariant: bool = False, scores: ScoreSpec = ..., mla: MlaSpec = ..., linear: "
      "LinearSpec = ...) -> None",
      "The needs of a group of layers. A missing head_dim_v means head_dim.")
      .def_prop_ro("draft_inputs", [](const AttentionSpec& self) { return draft_row(self).size; });
  bind_value_type<KvCacheSpec>(
      module, "KvCacheSpec",
      "def __init__(self, *, layout: KvLayout | str = 'mha', order: KvOrder | str = 'nhd', dtype: "
      "DType | str = 'fp32', scale: KvScale | str = 'none', layers: int = 1, kv_heads: int = 0, "
      "head_dim: int = 0, head_dim_v: int | None = None, page_size: int = 1, window: int = 0) -> "
      "None",
      "Layout of the cache of a group of layers. A missing head_dim_v means head_dim; the mla "
      "layouts need both.")
      .def_prop_ro("bytes_per_page", &KvCacheSpec::bytes_per_page);
  bind_value_type<StateCacheSpec>(
      module, "StateCacheSpec",
      "def __init__(self, *, layers: int = 1, conv_dim: int = 0, conv_width: int = 0, heads: int = "
      "0, rows: int = 0, columns: int = 0, dtype: DType | str = 'fp32', max_drafts: int = 0, "
      "draft_inputs: int = 0) -> None",
      "Layout of the recurrent states of linear layers.")
      .def_prop_ro("bytes_per_slot", &StateCacheSpec::bytes_per_slot);
  bind_value_type<BatchLimits>(
      module, "BatchLimits",
      "def __init__(self, *, max_requests: int = 1, max_tokens: int = 1, max_q_len: int = 1, "
      "max_kv_len: int = 1, max_encoder_len: int = 0, prefix_levels: int = 0, min_prefix_savings: "
      "int = ..., workspace_budget: int = ...) -> None",
      "Upper bounds by which reserve() sizes every buffer.");
}

}  // namespace fovea::python
