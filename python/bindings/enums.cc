// SPDX-License-Identifier: Apache-2.0
#include "python/bindings/enums.h"

#include "fovea/dtype.h"
#include "python/bindings/values.h"

namespace fovea::python {

#define FOVEA_ENUMERATORS(Enum, ...)                         \
  template <>                                                \
  std::span<const Enumerator<Enum>> enumerators<Enum>() {    \
    using enum Enum;                                         \
    static constexpr Enumerator<Enum> table[] = __VA_ARGS__; \
    return table;                                            \
  }

// A value whose member and text have its name.
#define FOVEA_SAME(name) \
  { name, #name, #name }

FOVEA_ENUMERATORS(DType, {{f32, "f32", "fp32"},
                          {f16, "f16", "fp16"},
                          {bf16, "bf16", "bf16"},
                          {f8e4m3, "f8e4m3", "fp8_e4m3"},
                          {f8e5m2, "f8e5m2", "fp8_e5m2"},
                          {i32, "i32", "int32"},
                          {i64, "i64", "int64"},
                          {u8, "u8", "uint8"}})
FOVEA_ENUMERATORS(AttentionKind, {FOVEA_SAME(mha), FOVEA_SAME(mla), FOVEA_SAME(gated_delta_net),
                                  FOVEA_SAME(mamba2), FOVEA_SAME(kda), FOVEA_SAME(lightning),
                                  FOVEA_SAME(mamba1), FOVEA_SAME(short_conv)})
FOVEA_ENUMERATORS(AttentionScope, {{decoder, "decoder", "decoder"},
                                   {ragged, "ragged", "ragged"},
                                   {encoder, "encoder", "encoder"},
                                   {encoder_cache, "encoder_cache", "encoder_cache"},
                                   {cross, "cross", "cross"}})
FOVEA_ENUMERATORS(MaskKind, {{none, "none", "none"},
                             {tree, "tree", "tree"},
                             {custom, "custom", "custom"},
                             {prefix_spans, "prefix_spans", "prefix_spans"},
                             {multi_item, "multi_item", "multi_item"}})
FOVEA_ENUMERATORS(ForwardMode, {{idle, "idle", "idle"},
                                {decode, "decode", "decode"},
                                {extend, "extend", "extend"},
                                {mixed, "mixed", "mixed"},
                                {target_verify, "target_verify", "target_verify"}})
FOVEA_ENUMERATORS(KvLayout, {{mha, "mha", "mha"},
                             {mla, "mla", "mla"},
                             {mla_fp8_rows, "mla_fp8_rows", "mla_fp8_rows"}})
FOVEA_ENUMERATORS(KvScale, {{none, "none", "none"},
                            {per_tensor, "per_tensor", "per_tensor"},
                            {per_head, "per_head", "per_head"},
                            {per_token_head, "per_token_head", "per_token_head"}})
FOVEA_ENUMERATORS(KvOrder, {{nhd, "nhd", "nhd"}, {hnd, "hnd", "hnd"}})
FOVEA_ENUMERATORS(DeviceKind, {{cpu, "cpu", "cpu"}, {cuda, "cuda", "cuda"}})
FOVEA_ENUMERATORS(RejectCode, {FOVEA_SAME(device),
                               FOVEA_SAME(kind),
                               FOVEA_SAME(scope),
                               FOVEA_SAME(mask),
                               FOVEA_SAME(heads),
                               FOVEA_SAME(head_dim),
                               FOVEA_SAME(q_dtype),
                               FOVEA_SAME(kv_dtype),
                               FOVEA_SAME(kv_scale),
                               FOVEA_SAME(kv_layout),
                               FOVEA_SAME(window),
                               FOVEA_SAME(chunk),
                               FOVEA_SAME(dual_chunk),
                               FOVEA_SAME(logit_cap),
                               FOVEA_SAME(sinks),
                               FOVEA_SAME(alibi),
                               FOVEA_SAME(rope),
                               FOVEA_SAME(lse),
                               FOVEA_SAME(batch_invariant),
                               FOVEA_SAME(limits),
                               FOVEA_SAME(not_built),
                               FOVEA_SAME(kernels)})
FOVEA_ENUMERATORS(FinishReason, {{none, "none", "none"},
                                 {stop, "stop", "stop"},
                                 {length, "length", "length"},
                                 {cancelled, "cancelled", "cancelled"},
                                 {failed, "failed", "failed"}})
FOVEA_ENUMERATORS(Phase, {{prefill, "prefill", "prefill"}, {decode, "decode", "decode"}})

#undef FOVEA_SAME
#undef FOVEA_ENUMERATORS

template <typename Enum>
Enum enum_from(nb::handle object, std::string_view name) {
  std::string known;
  const std::string text = PyUnicode_Check(object.ptr()) ? string_from(object, name) : "";
  for (const Enumerator<Enum>& enumerator : enumerators<Enum>()) {
    if (text == enumerator.text || text == enumerator.member) return enumerator.value;
    known += fmt::format("{}{}", known.empty() ? "" : ", ", enumerator.text);
  }
  if constexpr (std::is_same_v<Enum, DType>) {
    if (const std::optional<DType> dtype = parse_dtype(text)) return *dtype;
  }
  fail(ErrorCode::invalid_argument, "{} is {}, known: {}", name, value_text(object), known);
}

namespace {

template <typename Enum>
void bind_enum(nb::module_& module, const char* name) {
  nb::enum_<Enum> type(module, name, nb::is_str());
  for (const Enumerator<Enum>& enumerator : enumerators<Enum>()) {
    type.str_value(enumerator.member, enumerator.value, enumerator.text);
  }
  type.attr("__str__") = nb::handle(reinterpret_cast<PyObject*>(&PyUnicode_Type)).attr("__str__");
}

}  // namespace

void bind_enums(nb::module_& module) {
  bind_enum<DType>(module, "DType");
  bind_enum<AttentionKind>(module, "AttentionKind");
  bind_enum<AttentionScope>(module, "AttentionScope");
  bind_enum<MaskKind>(module, "MaskKind");
  bind_enum<ForwardMode>(module, "ForwardMode");
  bind_enum<KvLayout>(module, "KvLayout");
  bind_enum<KvScale>(module, "KvScale");
  bind_enum<KvOrder>(module, "KvOrder");
  bind_enum<DeviceKind>(module, "DeviceKind");
  bind_enum<RejectCode>(module, "RejectCode");
  bind_enum<FinishReason>(module, "FinishReason");
  bind_enum<Phase>(module, "Phase");
}

template DType enum_from<DType>(nb::handle, std::string_view);
template AttentionKind enum_from<AttentionKind>(nb::handle, std::string_view);
template AttentionScope enum_from<AttentionScope>(nb::handle, std::string_view);
template MaskKind enum_from<MaskKind>(nb::handle, std::string_view);
template ForwardMode enum_from<ForwardMode>(nb::handle, std::string_view);
template KvLayout enum_from<KvLayout>(nb::handle, std::string_view);
template KvScale enum_from<KvScale>(nb::handle, std::string_view);
template KvOrder enum_from<KvOrder>(nb::handle, std::string_view);
template DeviceKind enum_from<DeviceKind>(nb::handle, std::string_view);
template Phase enum_from<Phase>(nb::handle, std::string_view);

}  // namespace fovea::python
