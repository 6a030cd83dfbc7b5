// SPDX-License-Identifier: Apache-2.0
// Absorbed MLA decode on a GPU against fp64, for both kernels: ranks, heads, pages, lengths, masks,
// splits. Every byte that no request owns is NaN. Skipped without a GPU; tests/emulation runs the
// small cases of the portable kernel on the CPU.
#include "kernels/cuda/mla_decode.h"

#include <fmt/core.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "core/float_types.h"
#include "gpu/gpu.h"
#include "gpu/mla_decode_cases.h"
#include "kernels/cuda/common/measure_params.h"
#include "kernels/mla_row.h"
#include "support/device_array.h"
#include "support/error_budget.h"
#include "support/expect_close.h"
#include "support/gpu_kernel_test.h"
#include "support/poison.h"

namespace fovea::kernels::cuda {
namespace {

using test::to_device;
using test::to_host;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

using Case = MlaDecodeCase;

float read(DType dtype, uint16_t bits) {
  return dtype == DType::bf16 ? bf16_to_float(bits) : f16_to_float(bits);
}

std::vector<uint16_t> noise(DType dtype, size_t count, float spread, std::mt19937& random) {
  std::normal_distribution<float> normal(0, spread);
  std::vector<uint16_t> values(count);
  for (uint16_t& value : values) {
    value = dtype == DType::bf16 ? float_to_bf16(normal(random)) : float_to_f16(normal(random));
  }
  return values;
}

// The batch on the host. Cache pages are in random order, and unowned bytes are poisoned.
struct Problem {
  explicit Problem(const Case& test);
  int32_t columns() const { return test.rank + test.rope; }
  int64_t row_bytes() const {
    return test.cache == MlaCache::fp8_rows ? kMlaRowBytes
           : test.cache == MlaCache::e4m3   ? columns()
                                            : 2 * columns();
  }
  // Fills one row of the cache: its bytes and their values.
  void write_row(int64_t slot, std::mt19937& random);
  // Returns the cache before the new tokens of the requests.
  std::vector<uint8_t> earlier_cache() const;
  bool visible(size_t request, int32_t token, int32_t key) const;
  // Returns output and natural LSE of one row in fp64.
  std::vector<double> expected(size_t request, int32_t token, int32_t head, double& lse) const;

  const Case& test;
  int32_t tokens = 0, max_q_len = 0;
  int64_t pages = 1, table_stride = 1;
  std::vector<int32_t> q_indptr{0}, kv_lens, page_table;
  std::vector<int32_t> positions;  // drafts of a tree share them
  std::vector<uint64_t> tree;
  std::vector<uint16_t> q;
  std::vector<uint8_t> cache;
  std::vector<float> keys;    // [slots, columns]
  std::vector<float> scales;  // for e4m3 caches: one, or [slots]
};

constexpr float kCacheScale = 0.03f;  // for e4m3 caches

// Returns e4m3 of value / scale and stores its value in `meaning`.
uint8_t quantise(float value, float scale, float& meaning) {
  const uint8_t code = float_to_f8e4m3(value / scale);
  meaning = f8e4m3_to_float(code) * scale;
  return code;
}

void Problem::write_row(int64_t slot, std::mt19937& random) {
  const auto values = noise(test.dtype, static_cast<size_t>(columns()), test.spread, random);
  uint8_t* to = &cache[static_cast<size_t>(slot * row_bytes())];
  float* meaning = &keys[static_cast<size_t>(slot * columns())];
  for (int32_t d = 0; d < columns(); ++d) meaning[d] = read(test.dtype, values[d]);
  if (test.cache == MlaCache::as_queries) {
    std::memcpy(to, values.data(), values.size() * 2);
  } else if (test.cache == MlaCache::e4m3) {
    float scale = kCacheScale;
    if (test.scale_per_token) {
      const auto largest = [](float a, float b) { return std::max(a, std::fabs(b)); };
      const float most = std::accumulate(meaning, meaning + columns(), 0.0f, largest);
      scale = scales[static_cast<size_t>(slot)] = most / largest_finite(DType::f8e4m3);
    }
    for (int32_t d = 0; d < columns(); ++d) to[d] = quantise(meaning[d], scale, meaning[d]);
  } else {
    for (int32_t group = 0; group < kMlaRowLatent / kMlaRowScaleGroup; ++group) {
      float* of = meaning + group * kMlaRowScaleGroup;
      float most = 0;
      // Groups of very different magnitude, including subnormal codes.
      for (int32_t d = 0; d < kMlaRowScaleGroup; ++d) {
        of[d] *= std::ldexp(1.0f, -3 * group - (d % 16 == 0 ? 12 : 0));
        most = std::max(most, std::fabs(of[d]));
      }
      const float scale = most / largest_finite(DType::f8e4m3);
      // The values as the kernels read them: they round scales and products to f16.
      const float factor = f16_to_float(float_to_f16(16 * scale));
      for (int32_t d = 0; d < kMlaRowScaleGroup; ++d) {
        const uint8_t code = to[group * kMlaRowScaleGroup + d] = quantise(of[d], scale, of[d]);
        of[d] = f16_to_float(float_to_f16(f8e4m3_to_float(code) * factor)) / 16;
      }
      std::memcpy(to + kMlaRowScaleOffset + group * sizeof(float), &scale, sizeof(float));
    }
    for (int32_t d = 0; d < kMlaRowRope; ++d) {
      float& value = meaning[kMlaRowLatent + d];
      const uint16_t stored = float_to_bf16(value);
      value = bf16_to_float(stored);
      std::memcpy(to + kMlaRowRopeOffset + 2 * d, &stored, sizeof(stored));
    }
  }
}

Problem::Problem(const Case& c) : test(c) {
  std::mt19937 random(11);
  for (const auto& [q_len, kv_len] : c.requests) {
    const int64_t own = (kv_len + c.page_size - 1) / c.page_size;
    pages += own;
    table_stride = std::max(table_stride, own);
    max_q_len = std::max(max_q_len, q_len);
    q_indptr.push_back(tokens += q_len);
    kv_lens.push_back(kv_len);
    for (int32_t t = 0; t < q_len; ++t) {  // a binary tree: the parent of draft t is (t - 1) / 2
      const uint64_t parent = t > 0 ? tree[tree.size() - static_cast<size_t>(t - (t - 1) / 2)] : 0;
      tree.push_back(parent | 1ull << t);
      positions.push_back(kv_len - q_len + std::popcount(parent));
    }
  }
  if (c.distinct_pages > 0) pages = c.distinct_pages + 1;
  std::vector<int32_t> order(static_cast<size_t>(pages - 1));
  std::iota(order.begin(), order.end(), 1);
  std::shuffle(order.begin(), order.end(), random);
  page_table =
      test::index_array(c.requests.size() * static_cast<size_t>(table_stride), test::Fill::poison);
  cache.assign(static_cast<size_t>(pages * c.page_size * row_bytes()), test::kPoisonByte);
  keys.resize(static_cast<size_t>(pages) * c.page_size * columns());
  const auto slots = static_cast<size_t>(pages * c.page_size);
  scales.assign(c.scale_per_token ? slots : 1,
                c.scale_per_token ? std::numeric_limits<float>::quiet_NaN() : kCacheScale);
  size_t next = 0;
  for (size_t r = 0; r < c.requests.size(); ++r) {
    for (int32_t n = 0; n < kv_lens[r]; ++n) {
      int32_t& page = page_table[r * table_stride + n / c.page_size];
      if (n % c.page_size == 0) page = order[next++ % order.size()];
      if (next > order.size()) continue;  // the row is there
      write_row(int64_t{page} * c.page_size + n % c.page_size, random);
    }
  }
  q = noise(c.dtype, static_cast<size_t>(tokens) * c.heads * columns(), 1, random);
}

std::vector<uint8_t> Problem::earlier_cache() const {
  std::vector<uint8_t> earlier = cache;
  for (size_t r = 0; r < kv_lens.size(); ++r) {
    for (int32_t n = std::max(kv_lens[r] - test.requests[r].first, 0); n < kv_lens[r]; ++n) {
      const int64_t page = page_table[r * table_stride + n / test.page_size];
      const int64_t row = page * test.page_size + n % test.page_size;
      std::fill_n(&earlier[static_cast<size_t>(row * row_bytes())], row_bytes(), test::kPoisonByte);
    }
  }
  return earlier;
}

bool Problem::visible(size_t request, int32_t token, int32_t key) const {
  const int32_t prefix = kv_lens[request] - test.requests[request].first;
  const auto at = [&](int32_t n) {
    return test.tree && n >= prefix ? positions[q_indptr[request] + n - prefix] : n;
  };
  if (test.window > 0 && at(key) <= at(prefix + token) - test.window) return false;
  if (test.tree && key >= prefix) return tree[q_indptr[request] + token] >> (key - prefix) & 1;
  return key <= prefix + token;
}

std::vector<double> Problem::expected(size_t request, int32_t token, int32_t head,
                                      double& lse) const {
  const uint16_t* query =
      &q[(size_t{1} * (q_indptr[request] + token) * test.heads + head) * columns()];
  std::vector<double> out(static_cast<size_t>(test.rank)), scores;
  std::vector<const float*> rows;
  for (int32_t n = 0; n < kv_lens[request]; ++n) {
    if (!visible(request, token, n)) continue;
    const int64_t page = page_table[request * table_stride + n / test.page_size];
    rows.push_back(&keys[(page * test.page_size + n % test.page_size) * columns()]);
    double dot = 0;
    for (int32_t d = 0; d < columns(); ++d) {
      dot += static_cast<double>(read(test.dtype, query[d])) * rows.back()[d];
    }
    scores.push_back(dot / std::sqrt(columns()));
  }
  lse = -kInfinity;
  if (rows.empty()) return out;
  const double most = *std::max_element(scores.begin(), scores.end());
  double sum = 0;
  for (double& score : scores) sum += score = std::exp(score - most);
  lse = most + std::log(sum);
  for (size_t i = 0; i < rows.size(); ++i) {
    for (int32_t d = 0; d < test.rank; ++d) out[d] += scores[i] / sum * rows[i][d];
  }
  return out;
}

MlaDecodeSetup setup_of(const Case& c, const Problem& problem, const DeviceInfo& device) {
  return {.family = c.family,
          .q_heads = c.heads,
          .rank = c.rank,
          .rope = c.rope,
          .dtype = c.dtype,
          .cache = c.cache,
          .scale_per_token = c.scale_per_token,
          .windowed = c.window > 0,
          .page_size = c.page_size,
          .max_q_len = problem.max_q_len,
          .batch_invariant = c.batch_invariant,
          .join_patience = c.join_patience,
          .sm = device.sm,
          .multiprocessors = device.cores};
}

// Checks one row of the result, [rank], and its LSE.
void expect_row(const Problem& problem, const Case& c, size_t request, int32_t token, int32_t head,
                const uint16_t* got, float got_lse) {
  const test::ErrorBudget& budget = test::error_budget(c.dtype);
  double want_lse = 0;
  const std::vector<double> want = problem.expected(request, token, head, want_lse);
  double most = 0, worst = 0, dot = 0, norm_got = 0, norm_want = 0;
  for (int32_t d = 0; d < c.rank; ++d) {
    const double value = read(c.dtype, got[d]);
    ASSERT_TRUE(std::isfinite(value));
    most = std::max(most, std::fabs(want[d]));
    worst = std::max(worst, std::fabs(value - want[d]));
    dot += value * want[d];
    norm_got += value * value;
    norm_want += want[d] * want[d];
  }
  // A plain computation rounds the weights and the result to the dtype.
  ASSERT_LE(worst, (budget.times_plain + budget.units) * budget.unit * most);
  if (norm_want > 0) {
    ASSERT_LE(1 - dot / std::sqrt(norm_got * norm_want), budget.cosine_distance);
  }
  // Scores are fp32 sums over several hundred columns, and they are summed over the keys.
  const double terms = static_cast<double>(problem.columns()) + std::sqrt(problem.kv_lens[request]);
  ASSERT_TRUE(test::is_near(got_lse, want_lse,
                            (test::kLseBudget.units + terms) * test::kLseBudget.unit *
                                std::max(1.0, std::fabs(want_lse))));
}

// Checks every fifth head of each token, as fp64 on one core takes long.
void expect_rows(const Problem& problem, const Case& c, const std::vector<uint16_t>& got,
                 const std::vector<float>& got_lse) {
  for (size_t r = 0; r < c.requests.size(); ++r) {
    for (int32_t t = 0; t < c.requests[r].first; ++t) {
      for (int32_t h = t % 5; h < c.heads; h += 5) {
        SCOPED_TRACE(fmt::format("request {} token {} head {}", r, t, h));
        const size_t row = static_cast<size_t>(problem.q_indptr[r] + t) * c.heads + h;
        expect_row(problem, c, r, t, h, got.data() + row * c.rank, got_lse[row]);
        if (::testing::Test::HasFatalFailure()) return;
      }
    }
  }
}

class MlaDecodeTest : public test::GpuKernelTest<::testing::TestWithParam<Case>> {
 protected:
  void SetUp() override {
    GpuKernelTest::SetUp();
    if (IsSkipped()) return;
    const int sm = context->info().sm;
    if (GetParam().family == &hopper_mla() && sm != 90) GTEST_SKIP() << "not a Hopper GPU";
    if (sm < 80) GTEST_SKIP() << "a GPU before Ampere";
  }

  // Sets the rows of the new tokens to NaN until a kernel stores them that has already let the next
  // one start. Keep the returned buffer until it has.
  gpu::DeviceBuffer store_late(const Problem& problem, const gpu::DeviceBuffer& cache) {
    gpu::DeviceBuffer stored = to_device(problem.cache);
    if (context->info().sm < 90) return stored;  // kernels do not overlap
    constexpr int64_t kCycles = 20000;
    const std::vector<uint8_t> earlier = problem.earlier_cache();
    const auto bytes = static_cast<int64_t>(earlier.size());
    gpu::copy_to_device(cache.data(), earlier.data(), earlier.size(), nullptr);
    gpu::synchronize(nullptr);
    late_copy_ = load("measure/late_copy", {"256"});
    late_copy_.launch({4}, LateCopyParams{stored.data(), cache.data(), bytes, kCycles}, nullptr);
    return stored;
  }

 private:
  Kernel late_copy_;
};

TEST_P(MlaDecodeTest, MatchesFp64) {
  const Case& c = GetParam();
  const Problem problem(c);
  const MlaDecodeSetup setup = setup_of(c, problem, context->info());
  const BatchLimits limits = {.max_requests = static_cast<int32_t>(c.requests.size()),
                              .max_tokens = problem.tokens};
  MlaDecode decode(setup, *store);
  const gpu::DeviceBuffer workspace(MlaDecode::workspace_bytes(setup, limits));
  gpu::fill_bytes(workspace.data(), test::kPoisonByte, workspace.bytes(), nullptr);
  decode.reserve(limits, workspace.data<std::byte>());

  const auto q = to_device(problem.q), cache = to_device(problem.cache);
  const auto q_indptr = to_device(problem.q_indptr), kv_lens = to_device(problem.kv_lens);
  const auto page_table = to_device(problem.page_table);
  const auto tree = to_device(problem.tree), positions = to_device(problem.positions);
  const size_t rows = static_cast<size_t>(problem.tokens) * c.heads;
  const gpu::DeviceBuffer out(std::max<size_t>(rows * c.rank, 1) * 2);
  const gpu::DeviceBuffer lse(std::max<size_t>(rows, 1) * 4);
  gpu::fill_bytes(out.data(), test::kPoisonByte, out.bytes(), nullptr);
  gpu::fill_bytes(lse.data(), test::kPoisonByte, lse.bytes(), nullptr);

  BatchParams batch{};
  batch.q_indptr = q_indptr.data<int32_t>();
  batch.kv_lens = kv_lens.data<int32_t>();
  batch.requests = static_cast<int32_t>(c.requests.size());
  batch.q_heads = c.heads;
  batch.kv_heads = 1;
  batch.mask.causal = 1;
  if (c.tree) batch.mask.tree = tree.data<uint64_t>();
  if (c.tree && c.window > 0) batch.mask.positions = positions.data<int32_t>();
  batch.mask.window = c.window;
  const int64_t columns = problem.columns();
  const int64_t row_elements = problem.row_bytes() / (c.cache == MlaCache::as_queries ? 2 : 1);
  const auto cache_scale = to_device(problem.scales);
  const MlaDecodeTensors tensors = {
      .q_latent = {q.data(), c.heads * columns, columns},
      .q_rope = {q.data<uint16_t>() + c.rank, c.heads * columns, columns},
      .tokens = problem.tokens,
      .cache = cache.data(),
      .pages = problem.pages,
      .page_stride = c.page_size * row_elements,
      .token_stride = row_elements,
      .cache_scale = cache_scale.data<float>(),
      .page_table = {page_table.data<int32_t>(), problem.table_stride},
      .out = {out.data(), int64_t{c.heads} * c.rank, c.rank, lse.data<float>()},
      .scale = static_cast<float>(1 / std::sqrt(columns))};
  std::vector<uint16_t> got;
  // If `early`, the kernel may read the keys of earlier passes before the preceding kernel ends.
  for (const bool early : {false, true}) {
    batch.max_q_len = problem.max_q_len;
    PlanQueue plans({});
    decode.plan({.batch = batch, .keys = {.prefix_written = early, .max_kv_len = c.max_kv_len}},
                plans);
    plans.launch(nullptr, nullptr);
    decode.attend(tensors, nullptr);
    const auto first = to_host<uint16_t>(out, rows * c.rank);
    if (!early) got = first;
    EXPECT_EQ(first, got) << "a second plan changed the bits";
    // In emulation, five launches of a case give late keys other execution orders.
    if (early) decode.attend(tensors, nullptr);
    const gpu::DeviceBuffer stored = store_late(problem, cache);
    decode.attend(tensors, nullptr);
    EXPECT_EQ(to_host<uint16_t>(out, rows * c.rank), got)
        << "a second run changed the bits, early: " << early;
  }
  expect_rows(problem, c, got, to_host<float>(lse, rows));
}

INSTANTIATE_TEST_SUITE_P(All, MlaDecodeTest, ::testing::ValuesIn(mla_decode_cases()),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace fovea::kernels::cuda
