// SPDX-License-Identifier: Apache-2.0
#include "attention/backends/mla_forms.h"

#include <fmt/core.h>

namespace fovea {

bool can_up_project(const AttentionSpec& spec) {
  return spec.nope_dim > 0 && !spec.batch_invariant && spec.window == 0 && spec.chunk == 0 &&
         spec.mask == MaskKind::none && !spec.has_alibi && !spec.has_sinks;
}

MlaForm choose_mla_form(const AttentionSpec& spec, int32_t q_len, int32_t kv_len) {
  if (!can_up_project(spec) || q_len < kMinUpProjected) return MlaForm::absorbed;
  const double pairs = double{1} * q_len * kv_len - 0.5 * q_len * (q_len - 1.0);
  const double projection = double{1} * spec.kv_lora_rank * (spec.nope_dim + spec.v_dim);
  const double absorbed = pairs * (2.0 * spec.kv_lora_rank + spec.rope_dim) + q_len * projection;
  const double up_projected =
      pairs * (spec.nope_dim + spec.rope_dim + spec.v_dim) + kv_len * projection;
  return up_projected < absorbed ? MlaForm::up_projected : MlaForm::absorbed;
}

int32_t most_up_projected_context(const AttentionSpec& spec, int32_t q_len) {
  const auto up_projected = [&](int32_t context) {
    return choose_mla_form(spec, q_len, q_len + context) == MlaForm::up_projected;
  };
  if (!up_projected(0)) return -1;
  int32_t low = 0, high = kLongContext + 1;
  while (high - low > 1) {
    const int32_t middle = (low + high) / 2;
    (up_projected(middle) ? low : high) = middle;
  }
  return low;
}

MlaWeights with_head_strides(MlaWeights weights, const AttentionSpec& spec) {
  const int64_t rank = spec.kv_lora_rank;
  if (weights.w_uk_head_stride == 0) weights.w_uk_head_stride = spec.nope_dim * rank;
  if (weights.w_uv_head_stride == 0) weights.w_uv_head_stride = spec.v_dim * rank;
  return weights;
}

MlaWeights from_head(MlaWeights weights, int32_t head) {
  const auto element = static_cast<int64_t>(dtype_bytes(weights.dtype));
  weights.w_uk = static_cast<const char*>(weights.w_uk) + head * weights.w_uk_head_stride * element;
  weights.w_uv = static_cast<const char*>(weights.w_uv) + head * weights.w_uv_head_stride * element;
  return weights;
}

std::string describe_mla_forms(const AttentionSpec& spec, int32_t chunk_rows) {
  if (spec.nope_dim == 0) return "queries come absorbed: attention is over the latents";
  if (!can_up_project(spec)) {
    return "absorbed form only: masks, windows, chunks, sinks, biases and batch_invariant keep to "
           "it";
  }
  int32_t always = kMinUpProjected;  // new tokens from which on no context is too long
  while (always < kLongContext && most_up_projected_context(spec, always) < kLongContext) ++always;
  if (always == kLongContext) return "absorbed form only: it is the cheaper one for these dims";
  std::string text = fmt::format("up-projected from {} new tokens of a request on", always);
  if (always > kMinUpProjected) {
    const int32_t middle = (kMinUpProjected + always) / 2;
    text += fmt::format(
        ", and from {} on where few tokens stand before them (with {} new ones at "
        "most {})",
        kMinUpProjected, middle, most_up_projected_context(spec, middle));
  }
  return text + fmt::format("; context in chunks of {} rows; else absorbed", chunk_rows);
}

}  // namespace fovea
