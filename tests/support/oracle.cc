// SPDX-License-Identifier: Apache-2.0
#include "support/oracle.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "core/float_types.h"
#include "kernels/mla_row.h"
#include "support/cache_format.h"
#include "support/test_device.h"

namespace fovea::test {
namespace {

int64_t position_of_token(const RequestData& request, int32_t token) {
  return request.positions.empty() ? request.cached() + token : request.positions[token];
}

int64_t position_of_key(const RequestData& request, int32_t key) {
  return key < request.cached() ? key : position_of_token(request, key - request.cached());
}

// Returns the number of chunks of dual_chunk from the key to the query.
int64_t chunks_back(const AttentionSpec& spec, int64_t query, int64_t key) {
  const int32_t length = spec.dual_chunk.chunk_size - spec.dual_chunk.local_size;
  return query / length - key / length;
}

// The request's keys and values as attention sees them, per q head group: [kv_len, heads, width].
struct Keys {
  std::vector<double> k, v;
  int32_t heads = 0;  // 1 key head for mla; with weights every q head has its own
};

float as_f16(float value) { return f16_to_float(float_to_f16(value)); }

// Reads a row of 656 bytes as GPU kernels do for products in f16: they round its scales, times
// sixteen, before the values.
std::vector<double> read_as_f16(const StoredRow& row) {
  std::vector<double> values = row.values;
  for (size_t d = 0; d < kernels::kMlaRowLatent; ++d) {
    const size_t group = d / kernels::kMlaRowScaleGroup;
    const float scale = load_float(row.bytes.data() + kernels::kMlaRowScaleOffset, DType::f32,
                                   static_cast<int64_t>(group));
    const float code = load_float(row.bytes.data(), DType::f8e4m3, static_cast<int64_t>(d));
    values[d] = as_f16(code * as_f16(16 * scale)) / 16;
  }
  return values;
}

// rounded: as read_as_f16() where that applies.
Keys stored_keys(const AttentionCase& test, const RequestData& request, bool rounded) {
  const AttentionSpec& spec = test.spec;
  Keys keys;
  keys.heads = spec.kv_heads;
  if (!is_cached(spec)) {
    keys.k.assign(request.k.begin(), request.k.end());
    keys.v.assign(request.v.begin(), request.v.end());
    return keys;
  }
  const KvCacheSpec cache = complete_cache(test);
  for (int32_t token = 0; token < request.kv_len; ++token) {
    const StoredToken stored = store_token(spec, cache, request, token);
    for (const StoredRow& row : stored.k) {
      const std::vector<double> values = rounded ? read_as_f16(row) : row.values;
      keys.k.insert(keys.k.end(), values.begin(), values.end());
      // mla: the value is the latent, the front of the key.
      if (is_mla(spec)) {
        keys.v.insert(keys.v.end(), values.begin(), values.begin() + cached_value_dim(spec));
      }
    }
    for (const StoredRow& row : stored.v) {
      keys.v.insert(keys.v.end(), row.values.begin(), row.values.end());
    }
  }
  return keys;
}

// Rows of a matrix, to be multiplied by vectors. A product is a sum in the order of the columns, so
// each addition waits for the previous one; the sums of a block of rows run in parallel.
template <typename Real>
class RowBlocks {
 public:
  static constexpr size_t kRows = 16;
  using Products = std::array<Real, kRows>;

  // Row n begins at rows[n * stride].
  RowBlocks(const double* rows, size_t count, size_t stride, size_t width)
      : width_(width), columns_((count + kRows - 1) / kRows * width) {
    for (size_t row = 0; row < count; ++row) {
      Column* to = &columns_[row / kRows * width];
      for (size_t d = 0; d < width; ++d) {
        to[d].of_rows[row % kRows] = static_cast<Real>(rows[row * stride + d]);
      }
    }
  }

  // Multiplies the rows from block * kRows on; rows after the last one are 0.
  Products products(const float* vector, size_t block) const {
    const Column* column = &columns_[block * width_];
    Column sums;
    for (size_t d = 0; d < width_; ++d) {
      sums.of_rows += static_cast<Real>(vector[d]) * column[d].of_rows;
    }
    Products products;
    std::memcpy(&products, &sums, sizeof(products));
    return products;
  }

 private:
  struct Column {
    [[gnu::vector_size(kRows * sizeof(Real))]] Real of_rows = {};
  };

  size_t width_;
  std::vector<Column> columns_;  // [blocks, width]
};

// Multiplies weight [heads, width, rank] by latents; `to` is [tokens, heads, to_width].
template <typename Real>
void up_project(const std::vector<float>& weight, int32_t heads, int32_t width, int32_t rank,
                const RowBlocks<Real>& latents, size_t to_width, std::vector<double>& to) {
  constexpr size_t kBlock = RowBlocks<Real>::kRows;
  const size_t tokens = to.size() / (heads * to_width);
  for (int32_t head = 0; head < heads; ++head) {
    for (int32_t d = 0; d < width; ++d) {
      const float* row = &weight[(static_cast<size_t>(head) * width + d) * rank];
      for (size_t first = 0; first < tokens; first += kBlock) {
        const auto products = latents.products(row, first / kBlock);
        for (size_t token = first; token < std::min(first + kBlock, tokens); ++token) {
          to[(token * heads + head) * to_width + d] = products[token - first];
        }
      }
    }
  }
}

// Makes keys and values of every head from the latent, by DeepSeek's definition of MLA.
template <typename Real>
Keys up_projected(const AttentionSpec& spec, const CaseData& data, const Keys& stored) {
  const size_t tokens = stored.k.size() / spec.mla.row_dim();
  const auto k_size = static_cast<size_t>(spec.mla.nope_dim + spec.mla.rope_dim);
  const auto v_size = static_cast<size_t>(spec.mla.v_dim);
  Keys keys;
  keys.heads = spec.q_heads;
  keys.k.resize(tokens * spec.q_heads * k_size);
  keys.v.resize(tokens * spec.q_heads * v_size);
  const int32_t rank = spec.mla.kv_lora_rank;
  const RowBlocks<Real> latents(stored.k.data(), tokens, spec.mla.row_dim(), rank);
  up_project(data.w_uk, spec.q_heads, spec.mla.nope_dim, rank, latents, k_size, keys.k);
  up_project(data.w_uv, spec.q_heads, spec.mla.v_dim, rank, latents, v_size, keys.v);
  for (size_t token = 0; token < tokens; ++token) {
    const double* rope = &stored.k[token * spec.mla.row_dim() + rank];
    for (int32_t head = 0; head < spec.q_heads; ++head) {
      double* k = &keys.k[(token * spec.q_heads + head) * k_size];
      std::copy_n(rope, spec.mla.rope_dim, k + spec.mla.nope_dim);
    }
  }
  return keys;
}

template <typename Real>
class Softmax {
 public:
  Softmax(const AttentionCase& test, const CaseData& data, const RequestData& request,
          const Keys& keys)
      : spec_(test.spec),
        data_(data),
        request_(request),
        key_heads_(keys.heads),
        v_(keys.v.begin(), keys.v.end()) {
    const auto width = static_cast<size_t>(q_width(spec_));
    for (int32_t head = 0; head < key_heads_; ++head) {
      k_.emplace_back(keys.k.data() + head * width, static_cast<size_t>(request.kv_len),
                      key_heads_ * width, width);
    }
  }

  Expected run() {
    Expected expected;
    for (int32_t token = 0; token < request_.q_len; ++token) {
      const std::vector<bool> visible = visible_keys(spec_, request_, token);
      std::vector<int32_t> keys;
      for (int32_t key = 0; key < request_.kv_len; ++key) {
        if (visible[key]) keys.push_back(key);
      }
      for (int32_t head = 0; head < spec_.q_heads; ++head) attend(token, head, keys, expected);
    }
    return expected;
  }

 private:
  Real score(int32_t token, int32_t head, int32_t key, Real product) const {
    Real sum = product * static_cast<Real>(softmax_scale(spec_));
    if (!request_.q_scale.empty()) {
      sum *= static_cast<Real>(request_.q_scale[static_cast<size_t>(token) * spec_.q_heads + head]);
    }
    if (spec_.scores.logit_cap > 0) {
      const auto cap = static_cast<Real>(spec_.scores.logit_cap);
      sum = cap * std::tanh(sum / cap);
    }
    if (spec_.scores.has_alibi) {
      const int64_t distance = position_of_key(request_, key) - position_of_token(request_, token);
      sum += static_cast<Real>(data_.alibi_slopes[head]) * static_cast<Real>(distance);
    }
    return sum;
  }

  const std::vector<float>& queries_for(int32_t token, int32_t key) const {
    if (!spec_.dual_chunk) return request_.q;
    const int64_t back =
        chunks_back(spec_, position_of_token(request_, token), position_of_key(request_, key));
    return back == 0 ? request_.q : back == 1 ? request_.q_succ : request_.q_inter;
  }

  // Rounds the weight as products of fp8 do: e4m3, the largest as 2^8.
  Real rounded_weight(Real weight) const {
    if (std::is_same_v<Real, double> || !is_fp8(spec_.q_dtype)) return weight;
    float stored = 0;
    store_float(&stored, spec_.q_dtype, 0, static_cast<float>(weight) * 256);
    return static_cast<Real>(load_float(&stored, spec_.q_dtype, 0) / 256);
  }

  void attend(int32_t token, int32_t head, const std::vector<int32_t>& keys, Expected& to) const {
    const size_t row = static_cast<size_t>(token) * spec_.q_heads + head;
    const int32_t key_head = head / (spec_.q_heads / key_heads_);
    constexpr size_t kBlock = RowBlocks<Real>::kRows;
    std::vector<std::pair<int32_t, Real>> seen;
    Real largest = -std::numeric_limits<Real>::infinity();
    typename RowBlocks<Real>::Products products{};
    size_t block = SIZE_MAX;
    const std::vector<float>* last = nullptr;
    for (const int32_t key : keys) {
      const std::vector<float>& queries = queries_for(token, key);
      if (key / kBlock != block || &queries != last) {
        block = key / kBlock;
        last = &queries;
        products = k_[key_head].products(&queries[row * q_width(spec_)], block);
      }
      seen.emplace_back(key, score(token, head, key, products[key % kBlock]));
      largest = std::max(largest, seen.back().second);
    }
    const auto width = static_cast<size_t>(out_width(spec_));
    std::vector<Real> sum(width, 0);
    Real denominator = 0;
    for (const auto& [key, logit] : seen) {
      const Real weight = std::exp(logit - largest);
      denominator += weight;
      const Real* v = &v_[(static_cast<size_t>(key) * key_heads_ + key_head) * width];
      const Real factor = rounded_weight(weight);
      for (size_t d = 0; d < width; ++d) sum[d] += factor * v[d];
    }
    to.lse.push_back(seen.empty() ? -std::numeric_limits<double>::infinity()
                                  : static_cast<double>(largest + std::log(denominator)));
    // The sink is one more key whose value is zero.
    if (spec_.scores.has_sinks && !seen.empty()) {
      denominator += std::exp(static_cast<Real>(data_.sinks[head]) - largest);
    }
    for (size_t d = 0; d < width; ++d) {
      const Real value = seen.empty() ? Real{0} : sum[d] / denominator;
      to.out.push_back(static_cast<double>(value));
    }
  }

  const AttentionSpec& spec_;
  const CaseData& data_;
  const RequestData& request_;
  const int32_t key_heads_;
  std::vector<RowBlocks<Real>> k_;  // one per key head
  const std::vector<Real> v_;       // [kv_len, key heads, width]
};

}  // namespace

std::vector<bool> visible_keys(const AttentionSpec& spec, const RequestData& request,
                               int32_t token) {
  std::vector<bool> visible(static_cast<size_t>(request.kv_len), true);
  const auto hide = [&](auto&& hidden) {
    for (int32_t key = 0; key < request.kv_len; ++key) {
      if (hidden(key)) visible[key] = false;
    }
  };
  const int64_t here = position_of_token(request, token);
  const auto at = [&](int32_t key) { return position_of_key(request, key); };

  if (spec.mask == MaskKind::tree) {
    hide([&](int32_t key) { return key >= request.cached(); });
    for (int32_t node = token; node >= 0; node = request.parents[node]) {
      visible[request.cached() + node] = true;
    }
  } else if (is_causal(spec.scope)) {
    hide([&](int32_t key) { return key > request.cached() + token; });
  }
  if (spec.window > 0) hide([&](int32_t key) { return here - at(key) >= spec.window; });
  if (spec.chunk > 0) hide([&](int32_t key) { return at(key) / spec.chunk != here / spec.chunk; });
  if (spec.dual_chunk) hide([&](int32_t key) { return chunks_back(spec, here, at(key)) < 0; });
  if (spec.mask == MaskKind::custom) {
    const size_t row = static_cast<size_t>(token) * request.kv_len;
    hide([&](int32_t key) { return request.custom_mask[row + key] == 0; });
  }
  if (spec.mask == MaskKind::multi_item && here >= request.item_prefix) {
    const int64_t prefix = request.item_prefix;
    const int64_t begin = here - request.pos_in_item[static_cast<size_t>(here - prefix)];
    hide([&](int32_t key) { return at(key) >= prefix && at(key) < begin; });
  }
  for (const auto& [begin, end] : request.spans) {
    if (here < begin || here >= end) continue;
    for (int32_t key = 0; key < request.kv_len; ++key) {
      if (at(key) >= begin && at(key) < end) visible[key] = true;
    }
  }
  return visible;
}

// Rounds values as a GPU does between the projections and attention.
void round_to(DType dtype, std::vector<double>& values) {
  for (double& value : values) {
    float rounded = 0;
    store_float(&rounded, dtype, 0, static_cast<float>(value));
    value = load_float(&rounded, dtype, 0);
  }
}

OracleResult oracle(const AttentionCase& test, const CaseData& data, size_t index) {
  const RequestData& request = data.requests[index];
  const Keys stored = stored_keys(test, request, false);
  const bool up = has_mla_weights(test.spec);
  OracleResult result;
  result.exact = Softmax<double>(test, data, request,
                                 up ? up_projected<double>(test.spec, data, stored) : stored)
                     .run();
  const bool fp8_rows = on_gpu() && test.cache.layout == KvLayout::mla_fp8_rows;
  const Keys read =
      fp8_rows && test.spec.q_dtype == DType::f16 ? stored_keys(test, request, true) : stored;
  Keys plain = up ? up_projected<float>(test.spec, data, read) : read;
  // A GPU projects them, or multiplies them by the scales of a row.
  result.rounded_keys = fp8_rows || (on_gpu() && up);
  if (result.rounded_keys) {
    round_to(test.spec.q_dtype, plain.k);
    round_to(test.spec.q_dtype, plain.v);
  }
  result.plain = Softmax<float>(test, data, request, plain).run();
  round_to(activation_dtype(test.spec), result.plain.out);
  return result;
}

}  // namespace fovea::test
