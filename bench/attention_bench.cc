// SPDX-License-Identifier: Apache-2.0
// Measures the CPU attention kernel alone, as a fraction of this machine's ceilings. Uses random
// pages of 16 tokens, 32 query heads and 8 kv heads. Reports the best of ten repetitions: the time
// in the line _min, the rates in the line _max.
//
//   taskset -c 0 build/bench/attention_bench --benchmark_filter=decode
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

#include "bench/cpu_bench.h"
#include "core/float_types.h"
#include "kernels/cpu/attention.h"

namespace fovea {
namespace {

using kernels::AttentionParams;
using kernels::cpu::AttentionShape;

using bench::threads;

struct Problem {
  int32_t q_heads = 32, kv_heads = 8, head_dim = 128, head_dim_v = 128;
  int32_t requests = 1, q_len = 1, kv_len = 1;
  bool mla = false;
  DType q_dtype = DType::f32, kv_dtype = DType::f32;
};

std::vector<char> normal_values(DType dtype, int64_t count) {
  constexpr int64_t kPeriod = 1 << 16;
  std::mt19937 generator(1);
  std::normal_distribution<float> normal;
  std::vector<char> values(static_cast<size_t>(count) * dtype_bytes(dtype));
  const int64_t drawn = std::min(count, kPeriod);
  for (int64_t i = 0; i < drawn; ++i) store_float(values.data(), dtype, i, normal(generator));
  const size_t period = static_cast<size_t>(drawn) * dtype_bytes(dtype);
  for (size_t at = period; at < values.size(); ++at) values[at] = values[at - period];
  return values;
}

class Batch {
 public:
  explicit Batch(const Problem& problem) : problem_(problem) {
    const int64_t pages_each = (problem.kv_len + kPage - 1) / kPage;
    const int64_t slots = (pages_each * problem.requests + 1) * kPage;
    const int64_t k_row = int64_t{problem.kv_heads} * problem.head_dim;
    const int64_t v_row = int64_t{problem.kv_heads} * problem.head_dim_v;
    const int64_t q_rows = int64_t{problem.requests} * problem.q_len * problem.q_heads;
    k_ = normal_values(problem.kv_dtype, slots * k_row);
    if (!problem.mla) v_ = normal_values(problem.kv_dtype, slots * v_row);
    q_ = normal_values(problem.q_dtype, q_rows * problem.head_dim);
    out_.resize(static_cast<size_t>(q_rows) * problem.head_dim_v * dtype_bytes(problem.q_dtype));
    table_.resize(static_cast<size_t>(pages_each) * problem.requests);
    std::iota(table_.begin(), table_.end(), 1);
    std::shuffle(table_.begin(), table_.end(), std::mt19937(2));
    kv_lens_.assign(static_cast<size_t>(problem.requests), problem.kv_len);
    for (int32_t i = 0; i <= problem.requests; ++i) q_indptr_.push_back(i * problem.q_len);

    KvLayerView& cache = params_.keys.cache;
    cache.layout = problem.mla ? KvLayout::mla : KvLayout::mha;
    cache.dtype = problem.kv_dtype;
    cache.page_size = kPage;
    cache.slots = slots;
    cache.k = k_.data();
    cache.v = problem.mla ? cache.k : v_.data();
    cache.k_page_stride = kPage * k_row;
    cache.k_token_stride = k_row;
    cache.k_head_stride = problem.head_dim;
    cache.v_page_stride = problem.mla ? cache.k_page_stride : kPage * v_row;
    cache.v_token_stride = problem.mla ? k_row : v_row;
    cache.v_head_stride = problem.mla ? problem.head_dim : problem.head_dim_v;
    params_.keys.page_table = table_.data();
    params_.keys.page_table_stride = pages_each;
    params_.q = dense_rows(q_.data(), problem.q_dtype, problem.q_heads, problem.head_dim);
    params_.out = dense_rows(out_.data(), problem.q_dtype, problem.q_heads, problem.head_dim_v);
    params_.requests = problem.requests;
    params_.q_indptr = q_indptr_.data();
    params_.kv_lens = kv_lens_.data();
    params_.q_heads = problem.q_heads;
    params_.kv_heads = problem.kv_heads;
    params_.head_dim = problem.head_dim;
    params_.head_dim_v = problem.head_dim_v;
    params_.scale = 1 / std::sqrt(static_cast<float>(problem.head_dim));

    shape_ = {kernels::cpu::best_isa(), threads().size(), problem.q_heads,
              problem.kv_heads,         problem.head_dim, problem.head_dim_v};
    const int32_t tokens = problem.requests * problem.q_len;
    const size_t bytes = kernels::cpu::attention_workspace_bytes(
        shape_, {problem.requests, tokens, problem.q_len, problem.kv_len, 0});
    workspace_.resize(bytes / sizeof(Line) + 1);
    schedule_ = kernels::cpu::plan_attention(
        shape_, params_, {reinterpret_cast<std::byte*>(workspace_.data()), bytes});
  }

  void run() { kernels::cpu::attention(shape_, params_, schedule_, threads()); }

  double flops() const {
    const double keys = problem_.q_len > 1 ? (problem_.kv_len + 1) / 2.0 : problem_.kv_len;
    return 2.0 * problem_.requests * problem_.q_len * problem_.q_heads * keys *
           (problem_.head_dim + problem_.head_dim_v);
  }
  double cache_bytes() const { return static_cast<double>(k_.size() + v_.size()); }

 private:
  static constexpr int32_t kPage = 16;
  struct alignas(64) Line {
    std::byte bytes[64];
  };

  Problem problem_;
  std::vector<char> q_, k_, v_, out_;
  std::vector<int32_t> table_, kv_lens_, q_indptr_;
  std::vector<Line> workspace_;
  AttentionParams params_;
  AttentionShape shape_;
  kernels::cpu::AttentionSchedule schedule_;
};

void measure(benchmark::State& state, const Problem& problem) {
  Batch batch(problem);
  batch.run();
  for (auto _ : state) batch.run();
  bench::report(state, batch.flops(), batch.cache_bytes());
}

// Arguments: head_dim, tokens.
void prefill(benchmark::State& state, DType dtype) {
  Problem problem;
  problem.head_dim = problem.head_dim_v = static_cast<int32_t>(state.range(0));
  problem.q_len = problem.kv_len = static_cast<int32_t>(state.range(1));
  problem.q_dtype = problem.kv_dtype = dtype;
  measure(state, problem);
}

// Arguments: requests, keys per request.
void decode(benchmark::State& state, DType dtype) {
  Problem problem;
  problem.requests = static_cast<int32_t>(state.range(0));
  problem.kv_len = static_cast<int32_t>(state.range(1));
  problem.q_dtype = is_fp8(dtype) ? DType::bf16 : dtype;
  problem.kv_dtype = dtype;
  measure(state, problem);
}

// Arguments: query heads, requests, keys per request.
void mla_decode(benchmark::State& state, DType dtype) {
  Problem problem;
  problem.mla = true;
  problem.kv_heads = 1;
  problem.head_dim = 576;
  problem.head_dim_v = 512;
  problem.q_heads = static_cast<int32_t>(state.range(0));
  problem.requests = static_cast<int32_t>(state.range(1));
  problem.kv_len = static_cast<int32_t>(state.range(2));
  problem.q_dtype = problem.kv_dtype = dtype;
  measure(state, problem);
}

void best_of_ten(benchmark::internal::Benchmark* cases) {
  bench::best_of_ten(cases->Unit(benchmark::kMillisecond));
}

BENCHMARK_CAPTURE(prefill, f32, DType::f32)
    ->ArgsProduct({{64, 128}, {1024, 2048, 4096}})
    ->Apply(best_of_ten);
BENCHMARK_CAPTURE(prefill, bf16, DType::bf16)->ArgsProduct({{128}, {1024}})->Apply(best_of_ten);
BENCHMARK_CAPTURE(decode, f32, DType::f32)
    ->ArgsProduct({{1, 8, 32}, {1024, 4096}})
    ->Apply(best_of_ten);
BENCHMARK_CAPTURE(decode, bf16, DType::bf16)->ArgsProduct({{1, 32}, {4096}})->Apply(best_of_ten);
BENCHMARK_CAPTURE(decode, fp8, DType::f8e4m3)->ArgsProduct({{1, 32}, {4096}})->Apply(best_of_ten);
BENCHMARK_CAPTURE(mla_decode, bf16, DType::bf16)
    ->ArgsProduct({{16, 128}, {4}, {4096}})
    ->Apply(best_of_ten);

}  // namespace
}  // namespace fovea

BENCHMARK_MAIN();
