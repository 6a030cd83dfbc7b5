// SPDX-License-Identifier: Apache-2.0
#include "attention/mla_forms.h"

#include <fmt/core.h>

#include <algorithm>
#include <limits>

#include "attention/row_views.h"

namespace fovea {
namespace {

// Returns the longest context with which up to q_len new tokens are up-projected.
int64_t longest_context(const AttentionSpec& spec, int32_t q_len) {
  const int32_t most = max_up_projected_context(spec, q_len);
  return most < kLongContext ? std::max(most, 0) : std::numeric_limits<int32_t>::max();
}

// Returns the number of new tokens that separates the forms: requests with at least as many are
// cheaper up-projected, all others absorbed. 0: no number separates them.
int32_t min_up_projected(const AttentionSpec& spec, const BatchView& batch) {
  int32_t max_absorbed = 0, least = std::numeric_limits<int32_t>::max();
  for (int32_t i = 0; i < batch.requests; ++i) {
    const int32_t q_len = batch.hints.host_q_lens[i];
    if (q_len == 0) continue;
    if (choose_mla_form(spec, q_len, batch.hints.host_kv_lens[i]) == MlaForm::absorbed) {
      max_absorbed = std::max(max_absorbed, q_len);
    } else {
      least = std::min(least, q_len);
    }
  }
  return max_absorbed < least ? max_absorbed + 1 : 0;
}

void add_up_projected(MlaFormBounds& bounds, int64_t context, int32_t q_len, int32_t kv_len) {
  bounds.rows.context += context;
  bounds.rows.all += kv_len;
  ++bounds.requests;
  bounds.max_q_len = std::max(bounds.max_q_len, q_len);
  bounds.max_kv_len = std::max(bounds.max_kv_len, kv_len);
}

MlaFormBounds bound_by_q_len(const BatchView& batch, int32_t min_q_len) {
  MlaFormBounds bounds{.min_q_len = min_q_len, .by_q_len = true};
  for (int32_t i = 0; i < batch.requests; ++i) {
    const int32_t q_len = batch.hints.host_q_lens[i], kv_len = batch.hints.host_kv_lens[i];
    if (q_len >= min_q_len) {
      add_up_projected(bounds, std::max(kv_len - min_q_len, 0), q_len, kv_len);
    } else {
      bounds.max_absorbed = std::max(bounds.max_absorbed, q_len);
    }
  }
  return bounds;
}

}  // namespace

bool can_up_project(const AttentionSpec& spec) {
  return spec.mla.nope_dim > 0 && !spec.batch_invariant && spec.window == 0 && spec.chunk == 0 &&
         spec.mask == MaskKind::none && !spec.scores.has_alibi && !spec.scores.has_sinks;
}

MlaForm choose_mla_form(const AttentionSpec& spec, int32_t q_len, int32_t kv_len) {
  if (!can_up_project(spec) || q_len < kMinUpProjected) return MlaForm::absorbed;
  const double pairs = double{1} * q_len * kv_len - 0.5 * q_len * (q_len - 1.0);
  const double projection =
      double{1} * spec.mla.kv_lora_rank * (spec.mla.nope_dim + spec.mla.v_dim);
  const double absorbed =
      pairs * (2.0 * spec.mla.kv_lora_rank + spec.mla.rope_dim) + q_len * projection;
  const double up_projected =
      pairs * (spec.mla.nope_dim + spec.mla.rope_dim + spec.mla.v_dim) + kv_len * projection;
  return up_projected < absorbed ? MlaForm::up_projected : MlaForm::absorbed;
}

int32_t max_up_projected_context(const AttentionSpec& spec, int32_t q_len) {
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

MlaRows max_up_projected_rows(const BatchLimits& batch, int64_t max_context) {
  const int64_t requests = std::min(batch.max_requests, batch.max_tokens / kMinUpProjected);
  const int64_t before = std::min<int64_t>(max_context, batch.max_kv_len - kMinUpProjected);
  const int64_t context = requests * std::max<int64_t>(before, 0);
  const int64_t all = requests * std::min<int64_t>(batch.max_kv_len, max_context + batch.max_q_len);
  return {context, std::min(context + batch.max_tokens, all)};
}

MlaFormBounds bound_mla_forms(const AttentionSpec& spec, const BatchView& batch,
                              const BatchLimits& most, int64_t max_context) {
  MlaFormBounds bounds{.max_absorbed = most.max_q_len};
  if (batch.hints.host_q_lens.empty()) {
    if (max_up_projected_context(spec, most.max_q_len) < kLongContext) return bounds;
    bounds.rows = max_up_projected_rows(most, std::numeric_limits<int32_t>::max());
    bounds.requests = std::min(most.max_requests, most.max_tokens / kMinUpProjected);
    bounds.max_q_len = most.max_q_len;
    bounds.max_kv_len = most.max_kv_len;
    return bounds;
  }
  if (const int32_t least = min_up_projected(spec, batch); least > 0) {
    const MlaFormBounds apart = bound_by_q_len(batch, least);
    if (apart.rows.context <= max_context) return apart;
  }
  for (int32_t i = 0; i < batch.requests; ++i) {
    const int32_t q_len = batch.hints.host_q_lens[i], kv_len = batch.hints.host_kv_lens[i];
    if (q_len < kMinUpProjected) continue;
    const int64_t context = std::min<int64_t>(longest_context(spec, q_len), kv_len);
    const int64_t tokens = std::min<int64_t>(context + q_len, kv_len);
    add_up_projected(bounds, context, q_len, static_cast<int32_t>(tokens));
  }
  return bounds;
}

MlaWeights with_head_strides(MlaWeights weights, const AttentionSpec& spec) {
  const int64_t rank = spec.mla.kv_lora_rank;
  if (weights.w_uk_head_stride == 0) weights.w_uk_head_stride = spec.mla.nope_dim * rank;
  if (weights.w_uv_head_stride == 0) weights.w_uv_head_stride = spec.mla.v_dim * rank;
  return weights;
}

MlaWeights from_head(MlaWeights weights, int32_t head) {
  const auto element = static_cast<int64_t>(dtype_bytes(weights.dtype));
  weights.w_uk = static_cast<const char*>(weights.w_uk) + head * weights.w_uk_head_stride * element;
  weights.w_uv = static_cast<const char*>(weights.w_uv) + head * weights.w_uv_head_stride * element;
  return weights;
}

LayerTensors from_head(const LayerTensors& tensors, int32_t head, const AttentionSpec& spec) {
  LayerTensors from = tensors;
  if (tensors.q) from.q = from_head(tensors.q, head);
  if (tensors.mla.q_rope) from.mla.q_rope = from_head(tensors.mla.q_rope, head);
  if (tensors.out) from.out = from_head(tensors.out, head);
  if (spec.mla.nope_dim > 0) {
    from.mla.weights = from_head(with_head_strides(tensors.mla.weights, spec), head);
  }
  if (tensors.scores.sinks != nullptr) from.scores.sinks = tensors.scores.sinks + head;
  if (tensors.scores.alibi_slopes != nullptr)
    from.scores.alibi_slopes = tensors.scores.alibi_slopes + head;
  return from;
}

int32_t fewer_heads(int32_t q_heads, int32_t heads) {
  do {
    --heads;
  } while (heads > 0 && q_heads % heads != 0);
  return std::max(heads, 0);
}

int32_t heads_of_pass(int32_t q_heads, int32_t heads, int32_t max_tokens, int32_t tokens) {
  return int64_t{tokens} * q_heads <= int64_t{max_tokens} * heads ? q_heads : heads;
}

std::string describe_mla_forms(const AttentionSpec& spec, std::string_view context) {
  if (spec.mla.nope_dim == 0) return "queries come absorbed: attention is over the latents";
  if (!can_up_project(spec)) {
    return "absorbed form only: masks, windows, chunks, sinks, biases and batch_invariant keep to "
           "it";
  }
  int32_t always = kMinUpProjected;  // with so many new tokens, no context is too long
  while (always < kLongContext && max_up_projected_context(spec, always) < kLongContext) ++always;
  if (always == kLongContext) return "absorbed form only: it is the cheaper one for these dims";
  std::string text = fmt::format("up-projected from {} new tokens of a request on", always);
  if (always > kMinUpProjected) {
    const int32_t middle = (kMinUpProjected + always) / 2;
    text += fmt::format(
        ", and from {} on where few tokens stand before them (with {} new ones at "
        "most {})",
        kMinUpProjected, middle, max_up_projected_context(spec, middle));
  }
  return text + fmt::format("; {}; else absorbed", context);
}

}  // namespace fovea
