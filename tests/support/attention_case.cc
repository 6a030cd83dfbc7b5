// SPDX-License-Identifier: Apache-2.0
#include "support/attention_case.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>

#include "core/float_types.h"

namespace fovea::test {
namespace {

// The sum of four uniform numbers is nearly normal, and the same with every standard library.
float draw_normal(std::mt19937_64& random) {
  const uint64_t bits = random();
  double sum = -2;  // the mean
  for (int shift = 0; shift < 64; shift += 16) {
    sum += static_cast<double>((bits >> shift) & 0xffff) * 0x1p-16;
  }
  return static_cast<float>(sum * std::sqrt(3.0));  // the variance of the sum is 1/3
}

// Returns normal values with the given standard deviation, rounded to dtype.
std::vector<float> normal(std::mt19937_64& random, size_t size, DType dtype, float deviation = 1) {
  std::vector<float> values(size);
  for (float& value : values) {
    value = deviation * draw_normal(random);
    if (dtype == DType::f32) continue;
    float stored = 0;
    store_float(&stored, dtype, 0, value);
    value = load_float(&stored, dtype, 0);
  }
  return values;
}

int32_t pick(std::mt19937_64& random, int32_t low, int32_t high) {
  return std::uniform_int_distribution<int32_t>(low, high)(random);
}

void make_tree(std::mt19937_64& random, RequestData& data) {
  for (int32_t token = 0; token < data.q_len; ++token) {
    const int32_t parent = token == 0 ? -1 : pick(random, std::max(0, token - 4), token - 1);
    data.parents.push_back(parent);
    data.positions.push_back(parent < 0 ? data.cached() : data.positions[parent] + 1);
  }
}

void make_spans(std::mt19937_64& random, RequestData& data) {
  int32_t begin = pick(random, 0, 7);
  while (begin < data.kv_len) {
    const int32_t end = std::min(data.kv_len, begin + pick(random, 1, 40));
    data.spans.emplace_back(begin, end);
    begin = end + pick(random, 0, 20);
  }
}

void make_items(std::mt19937_64& random, RequestData& data) {
  data.item_prefix = static_cast<uint32_t>(data.kv_len / 3);
  int32_t inside = 0;
  for (int32_t token = data.kv_len / 3; token < data.kv_len; ++token) {
    if (pick(random, 0, 9) == 0) inside = 0;
    data.pos_in_item.push_back(static_cast<uint16_t>(inside++));
  }
}

void make_mask(std::mt19937_64& random, MaskKind mask, RequestData& data) {
  switch (mask) {
    case MaskKind::none:
      return;
    case MaskKind::tree:
      return make_tree(random, data);
    case MaskKind::custom:
      data.custom_mask.resize(static_cast<size_t>(data.q_len) * data.kv_len);
      for (uint8_t& byte : data.custom_mask) byte = pick(random, 0, 2) == 0 ? 0 : 1;
      // One row sees no key.
      if (data.q_len > 1) std::fill_n(data.custom_mask.begin(), data.kv_len, uint8_t{0});
      return;
    case MaskKind::prefix_spans:
      return make_spans(random, data);
    case MaskKind::multi_item:
      return make_items(random, data);
  }
}

RequestData make_request(std::mt19937_64& random, const AttentionSpec& spec, RequestShape shape) {
  RequestData data;
  data.q_len = shape.q_len;
  data.kv_len = shape.kv_len;
  const auto rows = static_cast<size_t>(shape.kv_len) * spec.kv_heads;
  const size_t q_row = static_cast<size_t>(spec.q_heads) * q_width(spec);
  for (int32_t token = 0; token < shape.q_len; ++token) {
    // Every third token has large scores.
    const float deviation = token % 3 == 2 ? 4.0f : 1.0f;
    const std::vector<float> row = normal(random, q_row, spec.q_dtype, deviation);
    data.q.insert(data.q.end(), row.begin(), row.end());
  }
  if (is_fp8(spec.q_dtype)) {
    std::uniform_real_distribution<float> scale(0.25f, 1.5f);
    for (int32_t i = 0; i < shape.q_len * spec.q_heads; ++i) data.q_scale.push_back(scale(random));
  }
  data.k = normal(random, rows * k_width(spec), activation_dtype(spec));
  data.v = normal(random, rows * v_width(spec), activation_dtype(spec));
  make_mask(random, spec.mask, data);
  if (spec.dual_chunk) {
    data.q_succ = normal(random, data.q.size(), spec.q_dtype);
    data.q_inter = normal(random, data.q.size(), spec.q_dtype);
  }
  return data;
}

// Multiplies keys by four `tokens` before the last, and again as many before these.
void grow_keys(int32_t tokens, RequestData& data) {
  const size_t row = data.k.size() / std::max(data.kv_len, 1);
  for (int32_t token = 0; token < data.kv_len; ++token) {
    const float factor = std::ldexp(1.0f, 2 * std::min((data.kv_len - 1 - token) / tokens, 2));
    for (size_t i = 0; i < row; ++i) data.k[token * row + i] *= factor;
  }
}

// Makes the same scores of larger q and k: 32 times normal values stay below 448, also for k with
// per_tensor's scale of 1/4.
void enlarge_codes(RequestData& data) {
  for (float& value : data.q) value *= 32;
  for (float& value : data.k) value *= 32;
  for (float& scale : data.q_scale) scale /= 32 * 32;
}

void move_item_prefix(size_t request, RequestData& data) {
  constexpr uint32_t kFar[] = {UINT32_MAX, 0x80000000u, 0x7fffffffu, 0xfffffff0u};
  data.item_prefix = kFar[request % std::size(kFar)];
  data.pos_in_item.clear();
}

void move_tokens(RequestData& data) {
  for (int32_t token = 0; token < data.q_len; ++token) {
    const int32_t at = std::max(0, data.cached() + token - token * 5 % 23);
    data.positions.push_back(token % 97 == 96 ? at / 2 : at);
  }
}

// Copies the first tokens of `from` over those of `to`.
void share_prefix(const RequestData& from, int32_t tokens, RequestData& to) {
  const auto share = [tokens](const std::vector<float>& source, int32_t length,
                              std::vector<float>& target) {
    const size_t row = source.size() / length;
    std::copy_n(source.begin(), row * tokens, target.begin());
  };
  share(from.k, from.kv_len, to.k);
  share(from.v, from.kv_len, to.v);
}

// Returns the values of a head that can rotate.
int32_t rotary_width(const AttentionSpec& spec) {
  return is_mla(spec) ? spec.mla.rope_dim : spec.head_dim;
}

RotaryTable make_rotary_table(const AttentionCase& test) {
  RotaryTable table;
  table.rotary_dim = test.rotary_dim > 0 ? test.rotary_dim : rotary_width(test.spec);
  for (const RequestShape& shape : test.requests) {
    table.positions = std::max({table.positions, shape.kv_len, 1});
  }
  if (test.spec.dual_chunk) table.positions = test.spec.dual_chunk.chunk_size + 1;
  for (int32_t position = 0; position < table.positions; ++position) {
    for (int32_t pair = 0; pair < table.rotary_dim / 2; ++pair) {
      const double angle = position * std::pow(1e4, -2.0 * pair / table.rotary_dim);
      table.cos.push_back(static_cast<float>(std::cos(angle)));
      table.sin.push_back(static_cast<float>(std::sin(angle)));
    }
  }
  return table;
}

// Rotates the last values of rows [tokens, heads, width], each token by its position, with the
// rounding of RotaryTensors.
void rotate(const AttentionCase& test, const RotaryTable& table, int32_t heads, int32_t width,
            const std::vector<int32_t>& positions, std::vector<float>& rows) {
  const int32_t pairs = table.rotary_dim / 2;
  const auto rounded = [&](float value) {
    float stored = 0;
    store_float(&stored, test.spec.q_dtype, 0, value);
    return load_float(&stored, test.spec.q_dtype, 0);
  };
  float* head = rows.data() + width - rotary_width(test.spec);
  for (const int32_t position : positions) {
    for (int32_t h = 0; h < heads; ++h, head += width) {
      for (int32_t pair = 0; pair < pairs; ++pair) {
        float& first = head[test.rope_interleaved ? 2 * pair : pair];
        float& second = head[test.rope_interleaved ? 2 * pair + 1 : pair + pairs];
        const size_t at = static_cast<size_t>(position) * pairs + pair;
        const float a_cos = first * table.cos[at], a_sin = first * table.sin[at];
        const float b_cos = second * table.cos[at], b_sin = second * table.sin[at];
        first = rounded(a_cos - b_sin);
        second = rounded(b_cos + a_sin);
      }
    }
  }
}

void rotate_request(const AttentionCase& test, const RotaryTable& table, RequestData& data) {
  data.given_q = data.q;
  data.given_k = data.k;
  data.given_v = data.v;
  std::vector<int32_t> of_keys(static_cast<size_t>(data.kv_len)), of_queries;
  std::iota(of_keys.begin(), of_keys.end(), 0);
  for (int32_t token = 0; token < data.q_len; ++token) {
    of_queries.push_back(rotary_position(data, token));
    if (data.cached() + token >= 0) of_keys[data.cached() + token] = of_queries.back();
  }
  const AttentionSpec& spec = test.spec;
  if (const auto [size, local] = spec.dual_chunk; size > 0) {
    const int32_t length = size - local;
    for (int32_t& position : of_keys) position %= length;
    std::vector<int32_t> of_succ;
    for (int32_t& position : of_queries) {
      position %= length;
      of_succ.push_back(std::min(length + position, size));
    }
    const std::vector<int32_t> of_inter(of_succ.size(), std::min(2 * length - 1, size));
    data.q_succ = data.q_inter = data.q;
    rotate(test, table, spec.q_heads, q_width(spec), of_succ, data.q_succ);
    rotate(test, table, spec.q_heads, q_width(spec), of_inter, data.q_inter);
  }
  rotate(test, table, spec.kv_heads, rotary_width(spec), of_keys, is_mla(spec) ? data.v : data.k);
  rotate(test, table, spec.q_heads, q_width(spec), of_queries, data.q);
}

}  // namespace

bool is_mla(const AttentionSpec& spec) { return spec.kind == AttentionKind::mla; }
bool has_mla_weights(const AttentionSpec& spec) { return is_mla(spec) && spec.mla.nope_dim > 0; }
bool is_cached(const AttentionSpec& spec) { return !is_packed(spec.scope); }

int32_t q_width(const AttentionSpec& spec) {
  return has_mla_weights(spec) ? spec.mla.nope_dim + spec.mla.rope_dim : cached_key_dim(spec);
}
int32_t k_width(const AttentionSpec& spec) {
  return is_mla(spec) ? spec.mla.kv_lora_rank : spec.head_dim;
}
int32_t v_width(const AttentionSpec& spec) {
  return is_mla(spec) ? spec.mla.rope_dim : spec.head_dim_v;
}
int32_t out_width(const AttentionSpec& spec) {
  if (convolves_alone(spec.kind)) return conv_dim_of(spec);  // a head is one channel
  if (is_linear(spec.kind)) return spec.linear.value_dim;
  return has_mla_weights(spec) ? spec.mla.v_dim : cached_value_dim(spec);
}

double softmax_scale(const AttentionSpec& spec) {
  if (spec.scores.softmax_scale != 0) return spec.scores.softmax_scale;
  return 1 / std::sqrt(is_mla(spec) ? spec.mla.nope_dim + spec.mla.rope_dim : spec.head_dim);
}

KvCacheSpec complete_cache(const AttentionCase& test) {
  KvCacheSpec cache = test.cache;
  cache.layers = 2;
  cache.kv_heads = test.spec.kv_heads;
  cache.head_dim = cached_key_dim(test.spec);
  cache.head_dim_v = cached_value_dim(test.spec);
  if (test.window_pool) cache.window = test.spec.window;
  return cache;
}

size_t owner_of(const AttentionCase& test, size_t request, int32_t token) {
  if (token < test.shared_prefix) return 0;
  if (token < test.group_prefix) return request - request % test.group_size;
  return request;
}

BatchLimits limits_of(const AttentionCase& test) {
  BatchLimits limits;
  limits.max_requests = std::max<int32_t>(1, static_cast<int32_t>(test.requests.size()));
  int32_t tokens = 0;
  const bool cross = test.spec.scope == AttentionScope::cross;
  for (const RequestShape& request : test.requests) {
    tokens += request.q_len;
    limits.max_q_len = std::max(limits.max_q_len, request.q_len);
    limits.max_kv_len = std::max(limits.max_kv_len, cross ? request.q_len : request.kv_len);
    if (cross) limits.max_encoder_len = std::max(limits.max_encoder_len, request.kv_len);
  }
  limits.max_tokens = std::max(1, tokens);
  limits.prefix_levels = test.prefix_levels;
  limits.workspace_budget = test.workspace_budget;
  limits.min_prefix_savings = 1;  // small cases have groups too
  return limits;
}

int32_t rotary_position(const RequestData& request, int32_t token) {
  if (!request.positions.empty()) return request.positions[token];
  return std::max(0, request.cached() + token);
}

CaseData make_data(const AttentionCase& test) {
  std::mt19937_64 random(test.seed);
  CaseData data;
  const AttentionSpec& spec = test.spec;
  for (const RequestShape& shape : test.requests) {
    data.requests.push_back(make_request(random, spec, shape));
    if (test.growing_scores) grow_keys(test.growth_tokens, data.requests.back());
    if (test.moved_tokens) move_tokens(data.requests.back());
    if (test.far_item_prefixes) move_item_prefix(data.requests.size(), data.requests.back());
    if (test.large_codes) enlarge_codes(data.requests.back());
    const size_t last = data.requests.size() - 1;
    for (const int32_t tokens : {test.group_prefix, test.shared_prefix}) {
      if (tokens == 0) continue;
      share_prefix(data.requests[owner_of(test, last, tokens - 1)], tokens, data.requests.back());
    }
  }
  if (spec.scores.has_sinks) {
    data.sinks = normal(random, static_cast<size_t>(spec.q_heads), DType::f32);
    if (test.infinite_sinks) {
      data.sinks.front() = std::numeric_limits<float>::infinity();
      data.sinks.back() = -std::numeric_limits<float>::infinity();
    }
  }
  if (spec.scores.has_alibi) {
    for (int32_t head = 0; head < spec.q_heads; ++head) {
      data.alibi_slopes.push_back(
          std::exp2(-8.0f * static_cast<float>(head + 1) / static_cast<float>(spec.q_heads)));
    }
  }
  if (spec.has_rope) {
    data.rotary = make_rotary_table(test);
    for (RequestData& request : data.requests) rotate_request(test, data.rotary, request);
  }
  if (has_mla_weights(spec)) {
    const size_t latent = static_cast<size_t>(spec.q_heads) * spec.mla.kv_lora_rank;
    const float deviation = 1 / std::sqrt(static_cast<float>(spec.mla.kv_lora_rank));
    data.w_uk = normal(random, latent * spec.mla.nope_dim, spec.q_dtype, deviation);
    data.w_uv = normal(random, latent * spec.mla.v_dim, spec.q_dtype, deviation);
  }
  return data;
}

}  // namespace fovea::test
