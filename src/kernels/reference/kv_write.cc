// SPDX-License-Identifier: Apache-2.0
#include "kernels/kv_write.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <vector>

#include "core/check.h"
#include "core/float_types.h"
#include "kernels/reference/reference.h"
#include "kernels/reference/rows.h"

namespace fovea::kernels::reference {
namespace {

// Returns the scale that maps the largest finite value of a row to the largest code.
float dynamic_scale(const float* row, int32_t dim, DType dtype) {
  float amax = 0;
  for (int32_t d = 0; d < dim; ++d) {
    if (std::isfinite(row[d])) amax = std::max(amax, std::fabs(row[d]));
  }
  const float scale = amax / largest_finite(dtype);
  return scale < FLT_MIN ? 1.0f : scale;
}

// The place of a row and its storage format.
struct Target {
  char* to = nullptr;
  DType dtype = DType::f32;
  bool finite_only = false;  // page 0
};

float finite(float value, DType dtype) {
  if (std::isnan(value)) return 0;
  const float limit = largest_finite(dtype);
  return std::clamp(value, -limit, limit);
}

void store_row(const Target& target, const float* row, int32_t dim, float scale) {
  for (int32_t d = 0; d < dim; ++d) {
    float value = row[d] / scale;
    if (target.finite_only) value = finite(value, target.dtype);
    store_float(target.to, target.dtype, d, value);
  }
}

std::vector<float> load_floats(const HeadRows& rows, int64_t token, int64_t head, int32_t dim) {
  std::vector<float> row(static_cast<size_t>(dim));
  const char* from = row_address(rows, token, head);
  for (int32_t d = 0; d < dim; ++d) row[static_cast<size_t>(d)] = load_float(from, rows.dtype, d);
  return row;
}

// `scales` is view.k_scale or view.v_scale.
void write_row(const KvLayerView& view, float* scales, const CacheRow& at, char* to,
               const std::vector<float>& row) {
  const auto dim = static_cast<int32_t>(row.size());
  if (view.scale == KvScale::per_token_head) {
    scales[at.slot * at.kv_heads + at.head] = dynamic_scale(row.data(), dim, view.dtype);
  }
  const Target target = {to, view.dtype, at.slot < view.page_size};
  store_row(target, row.data(), dim, row_scale(view.scale, scales, at));
}

void write_mla_fp8_row(const KvLayerView& view, int64_t slot, const std::vector<float>& row) {
  char* to = k_address(view, slot, 0);
  const bool finite_only = slot < view.page_size;
  for (int32_t begin = 0; begin < kMlaRowLatent; begin += kMlaRowScaleGroup) {
    const float scale = dynamic_scale(row.data() + begin, kMlaRowScaleGroup, DType::f8e4m3);
    const Target target = {to + begin, DType::f8e4m3, finite_only};
    store_row(target, row.data() + begin, kMlaRowScaleGroup, scale);
    store_float(to + kMlaRowScaleOffset, DType::f32, begin / kMlaRowScaleGroup, scale);
  }
  const Target rope = {to + kMlaRowRopeOffset, DType::bf16, finite_only};
  store_row(rope, row.data() + kMlaRowLatent, kMlaRowRope, 1.0f);
}

void write_mla(const KvWriteParams& params, int64_t token, int64_t slot) {
  std::vector<float> row = load_floats(params.k, token, 0, params.head_dim);
  if (params.v) {
    const std::vector<float> rope = load_floats(params.v, token, 0, params.head_dim_v);
    row.insert(row.end(), rope.begin(), rope.end());
  }
  if (params.cache.layout == KvLayout::mla_fp8_rows) {
    check_argument(row.size() == kMlaRowLatent + kMlaRowRope,
                   "656-byte rows hold 512 + 64 values, k and v bring {} + {}", params.head_dim,
                   params.v ? params.head_dim_v : 0);
    write_mla_fp8_row(params.cache, slot, row);
  } else {
    write_row(params.cache, params.cache.k_scale, {slot, 0, 1}, k_address(params.cache, slot, 0),
              row);
  }
}

void write_mha(const KvWriteParams& params, int64_t token, int64_t slot) {
  const KvLayerView& view = params.cache;
  for (int32_t head = 0; head < params.kv_heads; ++head) {
    const CacheRow at = {slot, head, params.kv_heads};
    write_row(view, view.k_scale, at, k_address(view, slot, head),
              load_floats(params.k, token, head, params.head_dim));
    write_row(view, view.v_scale, at, v_address(view, slot, head),
              load_floats(params.v, token, head, params.head_dim_v));
  }
}

}  // namespace

void kv_write(const KvWriteParams& params) {
  for (int64_t token = 0; token < params.tokens; ++token) {
    int64_t slot = params.slots[token];
    if (slot >= 0 && params.slot_map) slot = params.slot_map[slot];
    if (slot < 0) continue;
    check_argument(slot < params.cache.slots, "slot {} of token {} is beyond the cache's {} slots",
                   slot, token, params.cache.slots);
    if (params.cache.layout == KvLayout::mha) {
      write_mha(params, token, slot);
    } else {
      write_mla(params, token, slot);
    }
  }
}

}  // namespace fovea::kernels::reference
