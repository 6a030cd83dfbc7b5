// SPDX-License-Identifier: Apache-2.0
// The portable kernels on a GPU: cache write, page table, plan, attention, merge, against fp64
// loops. Skipped where there is no GPU; tests/emulation runs the small cases on the CPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "core/float_types.h"
#include "gpu/gpu.h"
#include "kernels/cuda/common/plan_launch.h"
#include "support/device_array.h"
#include "support/gpu_kernel_test.h"

namespace fovea::kernels::cuda {
namespace {

using test::to_device;
using test::to_host;

struct Case {
  std::string name;
  std::vector<std::pair<int32_t, int32_t>> requests;  // q_len, kv_len
  int32_t q_heads = 8, kv_heads = 2, head_dim = 128, head_dim_v = 128;
  int32_t page_size = 16;
  std::string cache = "bf16", query = "bf16";
  int32_t window = 0, chunk = 0;
  float logit_cap = 0;
  bool sinks = false, alibi = false, tree = false;
};

std::vector<uint16_t> random_bf16(size_t count, std::mt19937& random) {
  std::normal_distribution<float> normal;
  std::vector<uint16_t> values(count);
  for (uint16_t& value : values) value = float_to_bf16(normal(random));
  return values;
}

// A case, and whether its rows go to the tiles of decode.
using PortableKernels = test::GpuKernelTest<::testing::TestWithParam<std::tuple<Case, bool>>>;

// One batch, set up on the host, run on the device.
struct HostBatch {
  explicit HostBatch(const Case& test);
  // Element (row of new token t of all, head) of a dense [tokens, heads, dim] array.
  float q_at(int64_t row, int32_t head, int32_t d) const {
    const int64_t at = row * test.q_heads + head;
    const auto element = static_cast<size_t>(at * test.head_dim + d);
    if (q_codes.empty()) return bf16_to_float(q[element]);
    return f8e4m3_to_float(q_codes[element]) * q_scale[static_cast<size_t>(at)];
  }
  bool visible(int32_t request, int32_t token, int32_t key) const;
  // fp64 attention of one row from the cache as `cached` reads it.
  std::vector<double> expected(int32_t request, int32_t token, int32_t head, double& lse) const;

  const Case& test;
  int32_t tokens = 0, max_pages = 1, pages = 1, all_keys = 0;
  std::vector<int32_t> q_indptr{0}, kv_lens, kv_begin{0}, rows, slots_table;
  std::vector<int64_t> all_slots;  // of every key of every request, in order
  std::vector<uint64_t> tree;
  std::vector<uint16_t> q, k, v;      // k and v: [all_keys, kv_heads, dim]
  std::vector<uint8_t> q_codes;       // instead of q where queries are fp8
  std::vector<float> q_scale;         // theirs: [tokens, q_heads]
  std::vector<float> k_read, v_read;  // what the cache gives back
  std::vector<float> sinks, slopes;
};

HostBatch::HostBatch(const Case& c) : test(c) {
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
      if (t > 0)
        bits |= tree[tree.size() - static_cast<size_t>(t) + static_cast<size_t>((t - 1) / 2)];
      tree.push_back(bits);  // a binary tree: the parent of draft t is (t - 1) / 2
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
    sinks.push_back(0.3f * static_cast<float>(h) - 1);
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

bool HostBatch::visible(int32_t request, int32_t token, int32_t key) const {
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

std::vector<double> HostBatch::expected(int32_t request, int32_t token, int32_t head,
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

TEST_P(PortableKernels, MatchFp64) {
  const auto& [c, decode] = GetParam();
  const HostBatch run(c);
  const bool fp8 = c.cache != "bf16";
  const size_t element = fp8 ? 1 : 2;
  const int32_t slots = run.pages * c.page_size;
  const gpu::DeviceBuffer k_cache(static_cast<size_t>(slots) * c.kv_heads * c.head_dim * element);
  const gpu::DeviceBuffer v_cache(static_cast<size_t>(slots) * c.kv_heads * c.head_dim_v * element);
  // Every byte nobody writes is NaN.
  gpu::fill_bytes(k_cache.data(), 0xff, k_cache.bytes(), nullptr);
  gpu::fill_bytes(v_cache.data(), 0xff, v_cache.bytes(), nullptr);
  const gpu::DeviceBuffer k_scale(static_cast<size_t>(slots) * c.kv_heads * 4);
  const gpu::DeviceBuffer v_scale(static_cast<size_t>(slots) * c.kv_heads * 4);
  const auto k = to_device(run.k), v = to_device(run.v), q = to_device(run.q);
  const auto q_codes = to_device(run.q_codes), q_scale = to_device(run.q_scale);
  const auto all_slots = to_device(run.all_slots);
  const auto kv_begin = to_device(run.kv_begin), kv_lens = to_device(run.kv_lens);
  const auto q_indptr = to_device(run.q_indptr), rows = to_device(run.rows);
  const auto slots_table = to_device(run.slots_table), tree = to_device(run.tree);
  const auto sinks = to_device(run.sinks), slopes = to_device(run.slopes);
  const auto requests = static_cast<int32_t>(c.requests.size());

  KvWriteParams write{};
  write.k = k.data();
  write.v = v.data();
  write.k_token_stride = int64_t{c.kv_heads} * c.head_dim;
  write.k_head_stride = c.head_dim;
  write.v_token_stride = int64_t{c.kv_heads} * c.head_dim_v;
  write.v_head_stride = c.head_dim_v;
  write.slots = all_slots.data<int64_t>();
  write.slot_count = slots;
  write.q_indptr = kv_begin.data<int32_t>();
  write.requests = requests;
  write.k_cache = k_cache.data();
  write.v_cache = v_cache.data();
  write.k_page_stride = c.page_size * write.k_token_stride;
  write.v_page_stride = c.page_size * write.v_token_stride;
  write.k_place_stride = write.k_token_stride;
  write.v_place_stride = write.v_token_stride;
  write.k_cache_head_stride = c.head_dim;
  write.v_cache_head_stride = c.head_dim_v;
  write.k_scale = k_scale.data<float>();
  write.v_scale = v_scale.data<float>();
  write.scale_kind = fp8 ? kScalePerTokenHead : kScaleNone;
  write.page_size = c.page_size;
  write.kv_heads = c.kv_heads;
  write.head_dim = c.head_dim;
  write.head_dim_v = c.head_dim_v;
  load("portable/kv_write", {"bf16", c.cache})
      .launch({static_cast<uint32_t>((run.all_keys * c.kv_heads + 7) / 8)}, write, nullptr);

  const gpu::DeviceBuffer page_table(static_cast<size_t>(requests) * run.max_pages * 4);
  TableWriteParams table{};
  table.given = slots_table.data<int32_t>();
  table.given_stride = int64_t{run.max_pages} * c.page_size;
  table.given_end = slots;
  table.request_rows = rows.data<int32_t>();
  table.kv_lens = kv_lens.data<int32_t>();
  table.page_table = page_table.data<int32_t>();
  table.page_table_stride = run.max_pages;
  table.requests = requests;
  table.page_size = c.page_size;

  Kernel attention = load("portable/attention", {std::to_string(c.head_dim),
                                                 std::to_string(c.head_dim_v), c.query, c.cache,
                                                 decode                ? "16"
                                                 : c.head_dim_v <= 128 ? "128"
                                                                       : "64"});
  const int32_t ctas = context->info().cores * 2;
  const int32_t tile = attention.row_tile();
  int64_t tiles = requests;
  for (const auto& [q_len, kv_len] : c.requests) tiles += q_len * (c.q_heads / c.kv_heads) / tile;
  const gpu::DeviceBuffer items(static_cast<size_t>(tiles * c.kv_heads + ctas) * sizeof(WorkItem));
  const gpu::DeviceBuffer cta_begin(ctas * 4), cta_end(ctas * 4), merges(ctas * sizeof(MergeItem));
  const gpu::DeviceBuffer tile_indptr(static_cast<size_t>(requests + 1) * 4);
  const gpu::DeviceBuffer partial_out(static_cast<size_t>(2 * ctas) * tile * c.head_dim_v * 4);
  const gpu::DeviceBuffer partial_lse(static_cast<size_t>(2 * ctas) * tile * 4);
  gpu::fill_bytes(partial_out.data(), 0xff, partial_out.bytes(), nullptr);

  AttentionParams params{};
  params.batch.q_indptr = q_indptr.data<int32_t>();
  params.batch.kv_lens = kv_lens.data<int32_t>();
  params.batch.requests = requests;
  params.batch.q_heads = c.q_heads;
  params.batch.kv_heads = c.kv_heads;
  params.batch.mask = {.causal = 1, .window = c.window, .chunk = c.chunk};
  if (c.tree) params.batch.mask.tree = tree.data<uint64_t>();
  params.keys.k = k_cache.data();
  params.keys.v = v_cache.data();
  params.keys.k_page_stride = write.k_page_stride;
  params.keys.k_token_stride = write.k_place_stride;
  params.keys.k_head_stride = write.k_cache_head_stride;
  params.keys.v_page_stride = write.v_page_stride;
  params.keys.v_token_stride = write.v_place_stride;
  params.keys.v_head_stride = write.v_cache_head_stride;
  params.keys.page_table = page_table.data<int32_t>();
  params.keys.page_table_stride = run.max_pages;
  params.keys.page_size = c.page_size;
  if (fp8) {
    params.keys.k_scale = k_scale.data<float>();
    params.keys.v_scale = v_scale.data<float>();
    params.keys.scale_slot_stride = c.kv_heads;
    params.keys.scale_head_stride = 1;
  }
  params.q = run.q_codes.empty() ? q.data() : q_codes.data();
  if (!run.q_scale.empty()) params.q_scale = q_scale.data<float>();
  params.q_scale_token_stride = c.q_heads;
  params.q_scale_head_stride = 1;
  params.q_token_stride = int64_t{c.q_heads} * c.head_dim;
  params.q_head_stride = c.head_dim;
  const size_t out_count = static_cast<size_t>(run.tokens) * c.q_heads * c.head_dim_v;
  const gpu::DeviceBuffer out(std::max<size_t>(out_count, 1) * 2);
  const gpu::DeviceBuffer lse(std::max<size_t>(static_cast<size_t>(run.tokens) * c.q_heads, 1) * 4);
  gpu::fill_bytes(out.data(), 0xff, out.bytes(), nullptr);
  gpu::fill_bytes(lse.data(), 0xff, lse.bytes(), nullptr);
  params.out = out.data();
  params.out_token_stride = int64_t{c.q_heads} * c.head_dim_v;
  params.out_head_stride = c.head_dim_v;
  params.lse = lse.data<float>();
  params.head_dim = c.head_dim;
  params.head_dim_v = c.head_dim_v;
  params.scale = 1 / std::sqrt(static_cast<float>(c.head_dim));
  params.logit_cap = c.logit_cap;
  if (c.sinks) params.sinks = sinks.data<float>();
  if (c.alibi) params.alibi_slopes = slopes.data<float>();
  params.work = {.items = items.data<WorkItem>(),
                 .cta_begin = cta_begin.data<int32_t>(),
                 .cta_end = cta_end.data<int32_t>(),
                 .merges = merges.data<MergeItem>(),
                 .tile_indptr = tile_indptr.data<int32_t>(),
                 .partial_out = partial_out.data<float>(),
                 .partial_lse = partial_lse.data<float>(),
                 .ctas = ctas};
  const PlanLaunch<PlanParams> plan{{params.batch, params.work, 0}, {table}, 3};
  const MergeParams merge{
      params.batch,           params.work, params.out,   params.out_token_stride,
      params.out_head_stride, params.lse,  params.sinks, c.head_dim_v};
  load("portable/plan", {std::to_string(tile)}).launch({4}, plan, nullptr);
  attention.launch({static_cast<uint32_t>(ctas)}, params, nullptr);
  load("portable/merge", {std::to_string(tile), "bf16"})
      .launch({static_cast<uint32_t>(ctas), static_cast<uint32_t>(tile / 16)}, merge, nullptr);
  gpu::synchronize(nullptr);

  const auto got = to_host<uint16_t>(out, out_count);
  const auto got_lse = to_host<float>(lse, static_cast<size_t>(run.tokens) * c.q_heads);
  double error = 0, norm = 0;
  for (int32_t r = 0; r < requests; ++r) {
    const int32_t q_len = c.requests[r].first;
    for (int32_t t = 0; t < q_len; t += std::max(1, q_len / 37)) {
      for (int32_t h = 0; h < c.q_heads; ++h) {
        double lse_expected = 0;
        const auto expected = run.expected(r, t, h, lse_expected);
        const size_t row = static_cast<size_t>(run.q_indptr[r] + t) * c.q_heads + h;
        if (std::isinf(lse_expected)) {
          EXPECT_EQ(got_lse[row], -std::numeric_limits<float>::infinity())
              << "request " << r << " token " << t;
        } else {
          ASSERT_NEAR(got_lse[row], lse_expected, 2e-3)
              << "request " << r << " token " << t << " head " << h;
        }
        for (int32_t d = 0; d < c.head_dim_v; ++d) {
          const double difference = bf16_to_float(got[row * c.head_dim_v + d]) - expected[d];
          error += difference * difference;
          norm += expected[d] * expected[d];
        }
      }
    }
  }
  EXPECT_LE(std::sqrt(error), 5e-3 * std::sqrt(norm) + 1e-12);
}

std::vector<Case> cases() {
  const std::vector<std::pair<int32_t, int32_t>> decode = {
      {1, 1}, {1, 17}, {1, 4097}, {1, 64}, {1, 1000}};
  const std::vector<std::pair<int32_t, int32_t>> mixed = {{300, 300}, {1, 2000}, {0, 0},
                                                          {5, 700},   {64, 64},  {1, 1}};
  std::vector<Case> list;
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
  list.push_back({.name = "small_parts", .requests = {{5, 700}, {1, 650}, {20, 30}}});
  list.push_back({.name = "small_tree", .requests = {{15, 70}, {15, 15}}, .tree = true});
  list.push_back({.name = "tree", .requests = {{15, 300}, {15, 15}, {15, 2000}}, .tree = true});
  return list;
}

INSTANTIATE_TEST_SUITE_P(All, PortableKernels,
                         ::testing::Combine(::testing::ValuesIn(cases()), ::testing::Bool()),
                         [](const auto& test) {
                           return std::get<0>(test.param).name +
                                  (std::get<1>(test.param) ? "_decode_rows" : "");
                         });

}  // namespace
}  // namespace fovea::kernels::cuda
