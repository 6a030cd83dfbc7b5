// SPDX-License-Identifier: Apache-2.0
// Names a case and counts its work.
#include <fmt/core.h>

#include <algorithm>

#include "bench/gpu_cases.h"
#include "kernels/mla_row.h"

namespace fovea::bench {

std::string GpuCase::name() const {
  std::string text = fmt::format("{} {} h{}/{} d{}", phase, work, spec.q_heads, spec.kv_heads,
                                 cached_key_dim(spec));
  if (cached()) text += fmt::format(" p{}", page_size);
  if (fp8_products()) {
    text += " fp8";
  } else if (is_fp8(kv_dtype)) {
    text += " fp8-kv";
  }
  if (prefix_levels > 0) text += " cascade";
  if (spec.batch_invariant) text += " invariant";
  return text;
}

KvCacheSpec GpuCase::cache(int32_t layers) const {
  KvCacheSpec cache;
  const bool mla = spec.kind == AttentionKind::mla;
  cache.layout = mla_fp8_rows ? KvLayout::mla_fp8_rows : mla ? KvLayout::mla : KvLayout::mha;
  cache.dtype = kv_dtype;
  // If products run in fp8, a layer has one scale, as models with quantised queries do.
  cache.scale = !is_fp8(kv_dtype) || mla_fp8_rows ? KvScale::none
                : fp8_products()                  ? KvScale::per_tensor
                                                  : KvScale::per_token_head;
  cache.layers = layers;
  cache.kv_heads = spec.kv_heads;
  cache.head_dim = cached_key_dim(spec);
  cache.head_dim_v = cached_value_dim(spec);
  cache.page_size = page_size;
  return cache;
}

bool GpuCase::has_features() const {
  return spec.window > 0 || spec.chunk > 0 || spec.scores.logit_cap > 0 || spec.scores.has_alibi ||
         spec.scores.has_sinks || spec.mask != MaskKind::none;
}

int32_t GpuCase::tokens() const {
  int32_t sum = 0;
  for (const RequestLengths& request : requests) sum += request.q_len;
  return sum;
}

std::pair<int32_t, int32_t> GpuCase::visible(const RequestLengths& request, int32_t token) const {
  if (!cached()) return {0, request.kv_len};
  const int32_t position = request.kv_len - request.q_len + token;
  int32_t begin = 0;
  if (spec.window > 0) begin = position - spec.window + 1;
  if (spec.chunk > 0) begin = std::max(begin, position / spec.chunk * spec.chunk);
  return {std::max(begin, 0), position + 1};
}

int32_t GpuCase::longest_q() const {
  return std::ranges::max_element(requests, {}, &RequestLengths::q_len)->q_len;
}

int32_t GpuCase::longest_kv() const {
  return std::ranges::max_element(requests, {}, &RequestLengths::kv_len)->kv_len;
}

bool GpuCase::begins_group(size_t request) const {
  return sharers > 0 ? request % static_cast<size_t>(sharers) == 0 : request == 0;
}

double GpuCase::kv_bytes() const {
  double keys = 0;
  for (size_t i = 0; i < requests.size(); ++i) {
    keys += requests[i].kv_len - (begins_group(i) ? 0 : shared_prefix);
  }
  if (mla_fp8_rows) return keys * kernels::kMlaRowBytes;
  const int32_t columns =
      spec.kind == AttentionKind::mla ? spec.mla.row_dim() : spec.head_dim + spec.head_dim_v;
  return keys * spec.kv_heads * columns * static_cast<double>(dtype_bytes(kv_dtype));
}

int32_t GpuCase::q_width() const {
  return has_mla_weights() ? spec.mla.nope_dim + spec.mla.rope_dim : cached_key_dim(spec);
}

int32_t GpuCase::out_width() const {
  return has_mla_weights() ? spec.mla.v_dim : cached_value_dim(spec);
}

double GpuCase::bytes() const {
  const double out_bytes = 2;
  const double row =
      q_width() * static_cast<double>(dtype_bytes(spec.q_dtype)) + out_width() * out_bytes;
  const double weights =
      projection() * spec.q_heads * static_cast<double>(dtype_bytes(spec.q_dtype));
  return kv_bytes() + static_cast<double>(tokens()) * spec.q_heads * row + weights;
}

double GpuCase::flops() const {
  double sum = 0;  // multiply-adds per head
  for (const RequestLengths& request : requests) {
    double pairs = 0;
    for (int32_t token = 0; token < request.q_len; ++token) {
      const auto [begin, end] = visible(request, token);
      pairs += end - begin;
    }
    double own = pairs * (q_width() + out_width()) + request.kv_len * projection();
    if (has_mla_weights()) {
      const double absorbed =
          pairs * (spec.mla.row_dim() + spec.mla.kv_lora_rank) + request.q_len * projection();
      own = std::min(own, absorbed);
    }
    sum += own;
  }
  return 2 * sum * spec.q_heads;
}

double GpuCase::projection() const {
  return has_mla_weights()
             ? double{1} * spec.mla.kv_lora_rank * (spec.mla.nope_dim + spec.mla.v_dim)
             : 0;
}

}  // namespace fovea::bench
