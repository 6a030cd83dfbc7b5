// SPDX-License-Identifier: Apache-2.0
// Batches for the portable kernels, made on the host, with their results from fp64 loops.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "core/float_types.h"

namespace fovea::kernels::cuda {

struct PortableCase {
  std::string name;
  std::vector<std::pair<int32_t, int32_t>> requests;  // q_len, kv_len
  int32_t q_heads = 8, kv_heads = 2, head_dim = 128, head_dim_v = 128;
  int32_t page_size = 16;
  std::string cache = "bf16", query = "bf16";
  int32_t window = 0, chunk = 0;
  float logit_cap = 0;
  bool sinks = false, alibi = false, tree = false;
  bool v_by_heads = false;  // pages of V lie head by head, pages of K token by token
};

inline std::vector<uint16_t> random_bf16(size_t count, std::mt19937& random) {
  std::normal_distribution<float> normal;
  std::vector<uint16_t> values(count);
  for (uint16_t& value : values) value = float_to_bf16(normal(random));
  return values;
}

// A case as data.
struct HostBatch {
  explicit HostBatch(const PortableCase& test);
  // Returns an element of a dense [tokens, heads, dim] array; `row` counts the new tokens of all
  // requests.
  float q_at(int64_t row, int32_t head, int32_t d) const {
    const int64_t at = row * test.q_heads + head;
    const auto element = static_cast<size_t>(at * test.head_dim + d);
    if (q_codes.empty()) return bf16_to_float(q[element]);
    return f8e4m3_to_float(q_codes[element]) * q_scale[static_cast<size_t>(at)];
  }
  bool visible(int32_t request, int32_t token, int32_t key) const;
  // Returns the fp64 attention of one row over the cache as `cached` reads it.
  std::vector<double> expected(int32_t request, int32_t token, int32_t head, double& lse) const;

  const PortableCase& test;
  int32_t tokens = 0, max_pages = 1, pages = 1, all_keys = 0;
  std::vector<int32_t> q_indptr{0}, kv_lens, kv_begin{0}, rows, slots_table;
  std::vector<int64_t> all_slots;  // for every key of every request, in order
  std::vector<uint64_t> tree;
  std::vector<uint16_t> q, k, v;      // k and v: [all_keys, kv_heads, dim]
  std::vector<uint8_t> q_codes;       // replaces q where queries are fp8
  std::vector<float> q_scale;         // scales of q_codes: [tokens, q_heads]
  std::vector<float> k_read, v_read;  // values read back from the cache
  std::vector<float> sinks, slopes;
};

inline HostBatch::HostBatch(const PortableCase& c) : test(c) {
  std::mt19937 random(5);
  int32_t longest = 1;
  for (const auto& [q_len, kv_len] : c.requests) longest = std::max(longest, kv_len);
  max_pages = (longest + c.page_size - 1) / c.page_size;
  for (const auto& [q_len, kv_len] : c.requests) pages += (kv_len + c.page_size - 1) / c.page_size;
  std::vector<int32_t> order(static_cast<size_t>(pages - 1));
  std::iota(order.begin(), order.end(), 1);
  std::shuffle(order.begin(), order.end(), random);
  const int32_t stride = max_pages * c.page_size;
  size_t next_page = 0;
  for (const auto& [q_len, kv_len] : c.requests) {
    rows.push_back(static_cast<int32_t>(rows.size()));
    q_indptr.push_back(tokens += q_len);
    kv_lens.push_back(kv_len);
    kv_begin.push_back(all_keys += kv_len);
    std::vector<int32_t> row(static_cast<size_t>(stride), 0);
    for (int32_t n = 0; n < kv_len; ++n) {
      row[static_cast<size_t>(n)] =
          order[next_page + n / c.page_size] * c.page_size + n % c.page_size;
      all_slots.push_back(row[static_cast<size_t>(n)]);
    }
    next_page += (kv_len + c.page_size - 1) / c.page_size;
    slots_table.insert(slots_table.end(), row.begin(), row.end());
    for (int32_t t = 0; t < q_len; ++t) {
      uint64_t bits = 1ull << t;
      if (t > 1)
        bits |= tree[tree.size() - static_cast<size_t>(t) + static_cast<size_t>(t / 2 - 1)];
      tree.push_back(bits);  // two binary trees: the parent of draft t is t / 2 - 1
    }
  }
  q = random_bf16(static_cast<size_t>(tokens) * c.q_heads * c.head_dim, random);
  k = random_bf16(static_cast<size_t>(all_keys) * c.kv_heads * c.head_dim, random);
  v = random_bf16(static_cast<size_t>(all_keys) * c.kv_heads * c.head_dim_v, random);
  if (c.query != "bf16") {
    for (size_t i = 0; i < q.size(); ++i) {
      const size_t row = i / static_cast<size_t>(c.head_dim);
      if (row == q_scale.size()) q_scale.push_back(0.004f * static_cast<float>(1 + row % 5));
      q_codes.push_back(float_to_f8e4m3(bf16_to_float(q[i]) / q_scale[row]));
    }
  }
  for (int32_t h = 0; h < c.q_heads; ++h) {
    sinks.push_back(0.9f * static_cast<float>(h) - 1);  // up to a fifth of the weight of 700 keys
    slopes.push_back(std::exp2(-static_cast<float>(h + 1) / 2));
  }
  const auto read_back = [&](const std::vector<uint16_t>& from, int32_t dim,
                             std::vector<float>& to) {
    for (size_t row = 0; row < from.size(); row += static_cast<size_t>(dim)) {
      float most = 0;
      for (int32_t d = 0; d < dim; ++d)
        most = std::max(most, std::fabs(bf16_to_float(from[row + d])));
      const float scale = most / 448.0f;
      for (int32_t d = 0; d < dim; ++d) {
        const float value = bf16_to_float(from[row + d]);
        to.push_back(c.cache == "bf16" ? value
                                       : f8e4m3_to_float(float_to_f8e4m3(value / scale)) * scale);
      }
    }
  };
  read_back(k, c.head_dim, k_read);
  read_back(v, c.head_dim_v, v_read);
}

inline bool HostBatch::visible(int32_t request, int32_t token, int32_t key) const {
  const int32_t q_len = test.requests[request].first;
  const int32_t prefix = kv_lens[request] - q_len;
  const int32_t at = prefix + token;
  if (test.tree && key >= prefix) {
    if (!(tree[q_indptr[request] + token] >> (key - prefix) & 1)) return false;
  } else if (key > at) {
    return false;
  }
  if (test.window && key <= at - test.window) return false;
  return !test.chunk || key / test.chunk == at / test.chunk;
}

inline std::vector<double> HostBatch::expected(int32_t request, int32_t token, int32_t head,
                                               double& lse) const {
  const int32_t kv_head = head / (test.q_heads / test.kv_heads);
  const int64_t row = q_indptr[request] + token;
  const int32_t at = kv_lens[request] - test.requests[request].first + token;
  std::vector<double> out(static_cast<size_t>(test.head_dim_v)), scores;
  std::vector<int32_t> keys;
  for (int32_t n = 0; n < kv_lens[request]; ++n) {
    if (!visible(request, token, n)) continue;
    double dot = 0;
    const size_t base =
        (static_cast<size_t>(kv_begin[request] + n) * test.kv_heads + kv_head) * test.head_dim;
    for (int32_t d = 0; d < test.head_dim; ++d)
      dot += static_cast<double>(q_at(row, head, d)) * k_read[base + d];
    dot /= std::sqrt(static_cast<double>(test.head_dim));
    if (test.logit_cap > 0) dot = test.logit_cap * std::tanh(dot / test.logit_cap);
    if (test.alibi) dot += slopes[head] * static_cast<double>(n - at);
    scores.push_back(dot);
    keys.push_back(n);
  }
  lse = -std::numeric_limits<double>::infinity();
  if (scores.empty()) return out;
  const double most = *std::max_element(scores.begin(), scores.end());
  double sum = 0;
  for (double& score : scores) sum += score = std::exp(score - most);
  lse = most + std::log(sum);
  const double total = test.sinks ? sum + std::exp(sinks[head] - most) : sum;
  for (size_t i = 0; i < keys.size(); ++i) {
    const size_t base =
        (static_cast<size_t>(kv_begin[request] + keys[i]) * test.kv_heads + kv_head) *
        test.head_dim_v;
    for (int32_t d = 0; d < test.head_dim_v; ++d) out[d] += scores[i] / total * v_read[base + d];
  }
  return out;
}

inline std::vector<PortableCase> portable_cases() {
  const std::vector<std::pair<int32_t, int32_t>> decode = {
      {1, 1}, {1, 17}, {1, 4097}, {1, 64}, {1, 1000}};
  const std::vector<std::pair<int32_t, int32_t>> mixed = {{300, 300}, {1, 2000}, {0, 0},
                                                          {5, 700},   {64, 64},  {1, 1}};
  std::vector<PortableCase> list;
  list.push_back({.name = "decode", .requests = decode});
  list.push_back({.name = "one_long_decode", .requests = {{1, 30000}}});
  list.push_back({.name = "mixed", .requests = mixed});
  list.push_back({.name = "more_new_than_keys", .requests = {{9, 4}, {3, 3}}});
  list.push_back({.name = "page_1", .requests = mixed, .page_size = 1});
  list.push_back({.name = "page_3", .requests = mixed, .page_size = 3});
  list.push_back({.name = "page_64", .requests = mixed, .page_size = 64});
  list.push_back({.name = "group_7", .requests = mixed, .q_heads = 7, .kv_heads = 1});
  list.push_back({.name = "group_1", .requests = mixed, .q_heads = 4, .kv_heads = 4});
  list.push_back({.name = "dim_64", .requests = mixed, .head_dim = 64, .head_dim_v = 64});
  list.push_back({.name = "dim_80", .requests = mixed, .head_dim = 80, .head_dim_v = 80});
  list.push_back({.name = "dim_192_128", .requests = mixed, .head_dim = 192, .head_dim_v = 128});
  list.push_back({.name = "dim_256", .requests = mixed, .head_dim = 256, .head_dim_v = 256});
  list.push_back({.name = "fp8", .requests = mixed, .cache = "f8e4m3"});
  list.push_back({.name = "fp8_dim_64",
                  .requests = mixed,
                  .head_dim = 64,
                  .head_dim_v = 64,
                  .cache = "f8e4m3"});
  list.push_back({.name = "fp8_queries", .requests = mixed, .cache = "f8e4m3", .query = "f8e4m3"});
  list.push_back({.name = "window", .requests = mixed, .window = 100});
  list.push_back({.name = "chunk", .requests = mixed, .chunk = 128});
  list.push_back({.name = "cap", .requests = mixed, .logit_cap = 5});
  list.push_back({.name = "sinks", .requests = mixed, .sinks = true});
  list.push_back({.name = "alibi", .requests = mixed, .alibi = true});
  // For tests/emulation.
  const std::vector<std::pair<int32_t, int32_t>> small = {
      {30, 30}, {1, 150}, {0, 0}, {5, 80}, {1, 1}};
  list.push_back({.name = "small_mixed", .requests = small});
  list.push_back({.name = "small_fp8", .requests = small, .page_size = 1, .cache = "f8e4m3"});
  list.push_back(
      {.name = "small_fp8_queries", .requests = small, .cache = "f8e4m3", .query = "f8e4m3"});
  list.push_back({.name = "small_window_cap", .requests = small, .window = 20, .logit_cap = 5});
  list.push_back({.name = "small_sinks", .requests = small, .page_size = 64, .sinks = true});
  list.push_back({.name = "small_early", .requests = {{9, 4}, {3, 3}, {2, 0}, {1, 0}, {25, 5}}});
  list.push_back({.name = "small_early_sinks", .requests = {{9, 4}, {1, 0}}, .sinks = true});
  list.push_back({.name = "small_parts", .requests = {{5, 700}, {1, 650}, {20, 30}}});
  list.push_back({.name = "small_sinks_parts", .requests = {{5, 700}, {1, 650}}, .sinks = true});
  list.push_back({.name = "small_chunk", .requests = {{40, 90}, {1, 150}, {5, 66}}, .chunk = 32});
  list.push_back({.name = "small_page_3", .requests = small, .page_size = 3});
  list.push_back({.name = "small_alibi", .requests = small, .alibi = true});
  list.push_back({.name = "small_v_by_heads", .requests = small, .v_by_heads = true});
  list.push_back({.name = "small_without_keys", .requests = {{9, 4}, {3, 3}, {2, 0}}});
  // One row more than two tiles of 16 hold.
  list.push_back(
      {.name = "small_one_row_more", .requests = {{11, 40}}, .q_heads = 3, .kv_heads = 1});
  list.push_back({.name = "small_tree", .requests = {{15, 70}, {15, 15}}, .tree = true});
  list.push_back({.name = "tree", .requests = {{15, 300}, {15, 15}, {15, 2000}}, .tree = true});
  return list;
}

}  // namespace fovea::kernels::cuda
