// SPDX-License-Identifier: Apache-2.0
#include "attention/capability.h"

#include <fmt/core.h>

#include <algorithm>
#include <string>

#include "attention/names.h"
#include "attention/validate/spec.h"

namespace fovea {
namespace {

constexpr AttentionScope kAllScopes[] = {AttentionScope::decoder, AttentionScope::ragged,
                                         AttentionScope::encoder, AttentionScope::encoder_cache,
                                         AttentionScope::cross};
constexpr MaskKind kAllMasks[] = {MaskKind::none, MaskKind::tree, MaskKind::custom,
                                  MaskKind::prefix_spans, MaskKind::multi_item};
constexpr KvScale kAllKvScales[] = {KvScale::none, KvScale::per_tensor, KvScale::per_head,
                                    KvScale::per_token_head};

template <typename T>
bool has(std::span<const T> accepted, T value) {
  return std::find(accepted.begin(), accepted.end(), value) != accepted.end();
}

template <typename T>
std::string join_names(std::span<const T> values) {
  std::string text;
  for (const T value : values) {
    if (!text.empty()) text += ", ";
    text += name_of(value);
  }
  return text.empty() ? "none" : text;
}

// Collects reasons.
class Reasons {
 public:
  template <typename T>
  void unless_listed(RejectCode code, std::string_view what, std::span<const T> accepted, T value) {
    if (has(accepted, value)) return;
    add(code, fmt::format("{} is {}, accepted: {}", what, name_of(value), join_names(accepted)));
  }
  void unless(bool fits, RejectCode code, std::string text) {
    if (!fits) add(code, std::move(text));
  }
  void add(RejectCode code, std::string text) { reasons_.push_back({code, std::move(text)}); }
  std::vector<Reason> take() { return std::move(reasons_); }

 private:
  std::vector<Reason> reasons_;
};

void check_cache(const Capability& can, const KvCacheSpec& cache, Reasons& reasons) {
  reasons.unless_listed(RejectCode::kv_dtype, "cache dtype", can.kv_dtypes, cache.dtype);
  reasons.unless_listed(RejectCode::kv_scale, "cache scale", can.kv_scales, cache.scale);
  reasons.unless_listed(RejectCode::kv_layout, "cache layout", can.kv_layouts, cache.layout);
}

void check_scores(const Capability& can, const AttentionSpec& spec, Reasons& reasons) {
  reasons.unless(spec.window == 0 || can.window, RejectCode::window,
                 fmt::format("window is {}, accepted: 0", spec.window));
  reasons.unless(spec.chunk == 0 || can.chunk, RejectCode::chunk,
                 fmt::format("chunk is {}, accepted: 0", spec.chunk));
  reasons.unless(
      !spec.dual_chunk || can.dual_chunk, RejectCode::dual_chunk,
      fmt::format("dual_chunk.chunk_size is {}, accepted: 0", spec.dual_chunk.chunk_size));
  reasons.unless(spec.scores.logit_cap == 0 || can.logit_cap, RejectCode::logit_cap,
                 fmt::format("logit_cap is {}, accepted: 0", spec.scores.logit_cap));
  reasons.unless(!spec.scores.has_sinks || can.sinks, RejectCode::sinks,
                 "has_sinks is not supported");
  reasons.unless(!spec.scores.has_alibi || can.alibi, RejectCode::alibi,
                 "has_alibi is not supported");
  reasons.unless(!spec.has_rope || can.rope, RejectCode::rope, "has_rope is not supported");
  reasons.unless(!spec.needs_lse || can.lse, RejectCode::lse, "needs_lse is not supported");
}

}  // namespace

Capability every_feature() {
  Capability can;
  can.scopes = kAllScopes;
  can.masks = kAllMasks;
  can.kv_scales = kAllKvScales;
  can.window = can.chunk = can.dual_chunk = can.logit_cap = true;
  can.sinks = can.alibi = can.rope = can.lse = true;
  return can;
}

std::optional<Reason> device_reason(const Capability& can, const DeviceInfo& device) {
  if (can.device == DeviceKind::cpu) {
    if (device.kind == DeviceKind::cpu) return std::nullopt;
    return Reason{RejectCode::device, "device is a GPU, accepted: the CPU"};
  }
  const std::string accepted =
      fmt::format("sm_{}{}", can.min_sm, can.max_sm == can.min_sm ? "" : " or newer");
  if (device.kind != DeviceKind::cuda) {
    return Reason{RejectCode::device,
                  fmt::format("device is the CPU, accepted: NVIDIA GPUs of {}", accepted)};
  }
  if (device.sm >= can.min_sm && device.sm <= can.max_sm) return std::nullopt;
  return Reason{RejectCode::device,
                fmt::format("device is sm_{}, accepted: {}", device.sm, accepted)};
}

std::vector<Reason> capability_reasons(const Capability& can, const BackendRequest& request) {
  const AttentionSpec& spec = request.spec;
  Reasons reasons;
  if (auto reason = device_reason(can, request.device)) {
    reasons.add(RejectCode::device, std::move(reason->text));
  }
  reasons.unless_listed(RejectCode::kind, "kind", can.kinds, spec.kind);
  reasons.unless_listed(RejectCode::scope, "scope", can.scopes, spec.scope);
  reasons.unless_listed(RejectCode::mask, "mask", can.masks, spec.mask);
  const int32_t group = is_linear(spec.kind) ? 1 : spec.q_heads / spec.kv_heads;
  reasons.unless(group <= can.max_group, RejectCode::heads,
                 fmt::format("{} q heads share a kv head, at most {}", group, can.max_group));
  const int32_t head_dim = is_linear(spec.kind)
                               ? std::max(spec.linear.key_dim, spec.linear.value_dim)
                               : std::max(cached_key_dim(spec), cached_value_dim(spec));
  reasons.unless(head_dim <= can.max_head_dim, RejectCode::head_dim,
                 fmt::format("head_dim is {}, at most {}", head_dim, can.max_head_dim));
  reasons.unless_listed(RejectCode::q_dtype, "q_dtype", can.q_dtypes, spec.q_dtype);
  reasons.unless(!is_linear(spec.kind) || spec.q_dtype == DType::f32 || spec.q_dtype == DType::bf16,
                 RejectCode::q_dtype,
                 fmt::format("q_dtype is {}, linear kinds accept: {}, {}", dtype_name(spec.q_dtype),
                             dtype_name(DType::f32), dtype_name(DType::bf16)));
  if (uses_kv_cache(spec)) check_cache(can, request.cache, reasons);
  check_scores(can, spec, reasons);
  reasons.unless(!spec.batch_invariant || can.batch_invariant, RejectCode::batch_invariant,
                 "batch_invariant is not supported");
  return reasons.take();
}

}  // namespace fovea
