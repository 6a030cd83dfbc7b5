// SPDX-License-Identifier: Apache-2.0
#include "support/cache_format.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>

#include "core/float_types.h"

namespace fovea::test {
namespace {

float own_scale(std::span<const float> row, DType dtype) {
  float largest = 0;
  for (float x : row) largest = std::max(largest, std::fabs(x));
  float top = std::numeric_limits<float>::max();
  if (dtype == DType::f8e4m3) top = 448;
  if (dtype == DType::f8e5m2) top = 57344;
  if (dtype == DType::f16) top = 65504;
  if (dtype == DType::bf16) top = bf16_to_float(0x7f7f);
  const float scale = largest / top;
  return scale >= std::numeric_limits<float>::min() ? scale : 1.0f;
}

// Appends `row` to `to` as `dtype`.
void append(std::span<const float> row, DType dtype, float scale, StoredRow& to) {
  const size_t begin = to.bytes.size();
  to.bytes.resize(begin + row.size() * dtype_bytes(dtype));
  to.values.reserve(to.values.size() + row.size());
  for (size_t d = 0; d < row.size(); ++d) {
    const auto index = static_cast<int64_t>(d);
    store_float(to.bytes.data() + begin, dtype, index, row[d] / scale);
    const double code = load_float(to.bytes.data() + begin, dtype, index);
    to.values.push_back(code * static_cast<double>(scale));
  }
}

StoredRow store_row(const KvCacheSpec& cache, std::span<const float> row, float given_scale) {
  StoredRow stored;
  stored.scale = cache.scale == KvScale::per_token_head ? own_scale(row, cache.dtype) : given_scale;
  append(row, cache.dtype, stored.scale, stored);
  return stored;
}

// 512 codes, their four scales, 64 bf16.
StoredRow store_mla_fp8_row(std::span<const float> row) {
  StoredRow stored;
  std::vector<float> scales;
  for (size_t group = 0; group < 4; ++group) {
    const auto part = row.subspan(group * 128, 128);
    scales.push_back(own_scale(part, DType::f8e4m3));
    append(part, DType::f8e4m3, scales.back(), stored);
  }
  const auto* bytes = reinterpret_cast<const char*>(scales.data());
  stored.bytes.insert(stored.bytes.end(), bytes, bytes + 16);
  append(row.subspan(512), DType::bf16, 1, stored);
  return stored;
}

std::vector<float> given_scales(const KvCacheSpec& cache, float first) {
  std::vector<float> scales;
  if (cache.scale == KvScale::per_tensor) scales.push_back(first);
  if (cache.scale == KvScale::per_head) {
    for (int32_t head = 0; head < cache.kv_heads; ++head) {
      scales.push_back(first * (1 + 0.125f * static_cast<float>(head)));
    }
  }
  return scales;
}

float scale_of_head(const std::vector<float>& scales, int32_t head) {
  if (scales.empty()) return 1;
  return scales[std::min(static_cast<size_t>(head), scales.size() - 1)];
}

}  // namespace

std::vector<float> given_k_scales(const KvCacheSpec& cache) { return given_scales(cache, 0.25f); }
std::vector<float> given_v_scales(const KvCacheSpec& cache) { return given_scales(cache, 0.5f); }

StoredToken store_token(const AttentionSpec& spec, const KvCacheSpec& cache,
                        const RequestData& request, int32_t token) {
  StoredToken stored;
  const std::vector<float> k_scales = given_k_scales(cache), v_scales = given_v_scales(cache);
  const auto k_size = static_cast<size_t>(k_width(spec));
  const auto v_size = static_cast<size_t>(v_width(spec));
  for (int32_t head = 0; head < spec.kv_heads; ++head) {
    const size_t row = static_cast<size_t>(token) * spec.kv_heads + head;
    const std::span<const float> k(request.k.data() + row * k_size, k_size);
    const std::span<const float> v(request.v.data() + row * v_size, v_size);
    const float k_scale = scale_of_head(k_scales, head);
    if (is_mla(spec)) {
      std::vector<float> both(k.begin(), k.end());
      both.insert(both.end(), v.begin(), v.end());
      stored.k.push_back(cache.layout == KvLayout::mla_fp8_rows ? store_mla_fp8_row(both)
                                                                : store_row(cache, both, k_scale));
    } else {
      stored.k.push_back(store_row(cache, k, k_scale));
      stored.v.push_back(store_row(cache, v, scale_of_head(v_scales, head)));
    }
  }
  return stored;
}

}  // namespace fovea::test
