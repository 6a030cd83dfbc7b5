// SPDX-License-Identifier: Apache-2.0
#include "c/specs.h"

#include "c/arguments.h"

namespace fovea::c {
namespace {

fovea_attention_spec default_attention_spec() {
  return {.struct_size = sizeof(fovea_attention_spec)};
}

fovea_kv_cache_spec default_kv_cache_spec() {
  return {.struct_size = sizeof(fovea_kv_cache_spec), .page_size = 1};
}

fovea_state_cache_spec default_state_cache_spec() {
  return {.struct_size = sizeof(fovea_state_cache_spec)};
}

fovea_batch_limits default_batch_limits() {
  const BatchLimits limits;
  return {.struct_size = sizeof(fovea_batch_limits),
          .max_requests = limits.max_requests,
          .max_tokens = limits.max_tokens,
          .max_q_len = limits.max_q_len,
          .max_kv_len = limits.max_kv_len,
          .max_encoder_len = limits.max_encoder_len,
          .prefix_levels = limits.prefix_levels,
          .min_prefix_savings = limits.min_prefix_savings,
          .workspace_budget = limits.workspace_budget};
}

// Returns the text of a fixed array that may lack the zero byte.
template <size_t n>
std::string bounded_text(const char (&text)[n]) {
  return {text, strnlen(text, n)};
}

}  // namespace

AttentionSpec to_spec(const fovea_attention_spec* spec, std::string_view name) {
  const fovea_attention_spec from = read_struct(spec, default_attention_spec(), name);
  AttentionSpec to;
  to.kind = to_enum(from.kind, AttentionKind::short_conv, "kind");
  to.scope = to_enum(from.scope, AttentionScope::cross, "scope");
  to.mask = to_enum(from.mask, MaskKind::multi_item, "mask");
  to.q_heads = from.q_heads;
  to.kv_heads = from.kv_heads;
  to.head_dim = from.head_dim;
  to.head_dim_v = from.head_dim_v == 0 ? from.head_dim : from.head_dim_v;
  to.q_dtype = to_enum(from.q_dtype, DType::u8, "q_dtype");
  to.window = from.window;
  to.chunk = from.chunk;
  to.dual_chunk = {from.dual_chunk.chunk_size, from.dual_chunk.local_size};
  to.has_rope = to_flag(from.has_rope, "has_rope");
  to.needs_lse = to_flag(from.needs_lse, "needs_lse");
  to.batch_invariant = to_flag(from.batch_invariant, "batch_invariant");
  to.scores = {.softmax_scale = from.scores.softmax_scale,
               .logit_cap = from.scores.logit_cap,
               .has_sinks = to_flag(from.scores.has_sinks, "scores.has_sinks"),
               .has_alibi = to_flag(from.scores.has_alibi, "scores.has_alibi")};
  to.mla = {.kv_lora_rank = from.mla.kv_lora_rank,
            .rope_dim = from.mla.rope_dim,
            .nope_dim = from.mla.nope_dim,
            .v_dim = from.mla.v_dim};
  to.linear = {.key_heads = from.linear.key_heads,
               .value_heads = from.linear.value_heads,
               .key_dim = from.linear.key_dim,
               .value_dim = from.linear.value_dim,
               .conv_width = from.linear.conv_width};
  return to;
}

KvCacheSpec to_spec(const fovea_kv_cache_spec* spec, std::string_view name) {
  const fovea_kv_cache_spec from = read_struct(spec, default_kv_cache_spec(), name);
  KvCacheSpec to;
  to.layout = to_enum(from.layout, KvLayout::mla_fp8_rows, "layout");
  to.order = to_enum(from.order, KvOrder::hnd, "order");
  to.dtype = to_enum(from.dtype, DType::u8, "dtype");
  to.scale = to_enum(from.scale, KvScale::per_token_head, "scale");
  to.layers = from.layers;
  to.kv_heads = from.kv_heads;
  to.head_dim = from.head_dim;
  const bool same_widths = from.head_dim_v == 0 && to.layout == KvLayout::mha;
  to.head_dim_v = same_widths ? from.head_dim : from.head_dim_v;
  to.page_size = from.page_size;
  to.window = from.window;
  return to;
}

StateCacheSpec to_spec(const fovea_state_cache_spec* spec, std::string_view name) {
  const fovea_state_cache_spec from = read_struct(spec, default_state_cache_spec(), name);
  return {.layers = from.layers,
          .conv_dim = from.conv_dim,
          .conv_width = from.conv_width,
          .heads = from.heads,
          .rows = from.rows,
          .columns = from.columns,
          .dtype = to_enum(from.dtype, DType::u8, "dtype"),
          .max_drafts = from.max_drafts,
          .draft_inputs = from.draft_inputs};
}

BatchLimits to_limits(const fovea_batch_limits* limits) {
  const fovea_batch_limits from = read_struct(limits, default_batch_limits(), "limits");
  check_reserved(from.reserved, "limits.reserved");
  return {.max_requests = from.max_requests,
          .max_tokens = from.max_tokens,
          .max_q_len = from.max_q_len,
          .max_kv_len = from.max_kv_len,
          .max_encoder_len = from.max_encoder_len,
          .prefix_levels = from.prefix_levels,
          .min_prefix_savings = from.min_prefix_savings,
          .workspace_budget = from.workspace_budget};
}

Device to_device(fovea_device device, std::string_view name) {
  check(device.kind == FOVEA_CPU || device.kind == FOVEA_CUDA,
        "{}.kind is {}, must be {} (CPU) or {} (CUDA)", name, device.kind, int{FOVEA_CPU},
        int{FOVEA_CUDA});
  check(device.index >= 0, "{}.index is {}, must not be negative", name, device.index);
  return {device.kind == FOVEA_CPU ? DeviceKind::cpu : DeviceKind::cuda, device.index};
}

fovea_device from_device(Device device) {
  return {device.kind == DeviceKind::cpu ? FOVEA_CPU : FOVEA_CUDA, device.index};
}

DeviceInfo to_device_info(const fovea_device_info* info) {
  const fovea_device_info from =
      read_struct(info, {.struct_size = sizeof(fovea_device_info), .cores = 1}, "device");
  check_reserved(from.reserved, "device.reserved");
  const Device device = to_device(from.device);
  return {.kind = device.kind,
          .index = device.index,
          .name = bounded_text(from.name),
          .sm = from.sm,
          .isa = bounded_text(from.isa),
          .cores = from.cores,
          .memory_bytes = from.memory_bytes};
}

}  // namespace fovea::c

using namespace fovea::c;  // NOLINT: the functions below are those of the C header

fovea_status fovea_attention_spec_init(fovea_attention_spec* spec, size_t struct_size) {
  return init_struct(spec, struct_size, default_attention_spec(), "spec");
}

fovea_status fovea_kv_cache_spec_init(fovea_kv_cache_spec* spec, size_t struct_size) {
  return init_struct(spec, struct_size, default_kv_cache_spec(), "spec");
}

fovea_status fovea_state_cache_spec_init(fovea_state_cache_spec* spec, size_t struct_size) {
  return init_struct(spec, struct_size, default_state_cache_spec(), "spec");
}

fovea_status fovea_draft_inputs(const fovea_attention_spec* spec, int32_t* values) {
  return guarded([&] {
    check_pointer(values, "values");
    const fovea::AttentionSpec layers = to_spec(spec);
    constexpr int32_t kMax = 1 << 14;  // products of two stay below 2^31
    const auto& linear = layers.linear;
    for (const auto& [value, name] : {std::pair(linear.key_heads, "key_heads"),
                                      {linear.value_heads, "value_heads"},
                                      {linear.key_dim, "key_dim"},
                                      {linear.value_dim, "value_dim"}}) {
      check(value >= 0 && value <= kMax, "linear.{} is {}, must be in [0, {}]", name, value, kMax);
    }
    set(values, fovea::draft_row(layers).size, "values");
  });
}

fovea_status fovea_batch_limits_init(fovea_batch_limits* limits, size_t struct_size) {
  return init_struct(limits, struct_size, default_batch_limits(), "limits");
}

fovea_status fovea_kv_pool_bytes(const fovea_kv_cache_spec* spec, int64_t pages, int64_t full_slots,
                                 size_t* bytes) {
  return guarded([&] {
    check_pointer(bytes, "bytes");
    set(bytes, fovea::kv_pool_bytes(to_spec(spec), pages, full_slots), "bytes");
  });
}
