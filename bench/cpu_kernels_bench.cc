// SPDX-License-Identifier: Apache-2.0
// Measures the CPU kernels other than attention (matrix products, linear layers, cache writes), as
// fractions of this machine's ceilings. Reports the best of ten repetitions: the time in the line
// _min, the rates in the line _max.
//
//   taskset -c 0 build/bench/cpu_kernels_bench --benchmark_filter=gemm
#include <cstdint>
#include <vector>

#include "bench/cpu_bench.h"
#include "kernels/cpu/cpu.h"

namespace fovea {
namespace {

using kernels::GemmParams;
using kernels::cpu::best_isa;
using kernels::cpu::Isa;

using bench::report;
using bench::threads;

// Multiplies rows x 2048 x 2048. Products rotate over 40 matrices, so that the weights come from
// memory.
void gemm(benchmark::State& state, DType dtype, bool weight_is_kn, Isa isa = best_isa()) {
  if (!kernels::cpu::has_isa(isa)) return state.SkipWithError("not on this processor");
  constexpr int32_t kSize = 2048;
  const auto rows = static_cast<int32_t>(state.range(0));
  const size_t matrix = size_t{kSize} * kSize * dtype_bytes(dtype);
  const size_t matrices = rows <= 16 ? 40 : 1;
  const std::vector<char> weights(matrix * matrices, 1);
  const std::vector<float> x(static_cast<size_t>(rows) * kSize, 0.5f);
  std::vector<float> out(static_cast<size_t>(rows) * kSize);
  GemmParams params;
  params.x = x.data();
  params.x_stride = params.out_stride = params.weight_stride = kSize;
  params.weight_dtype = dtype;
  params.weight_is_kn = weight_is_kn;
  params.out = out.data();
  params.rows = rows;
  params.n = params.k = kSize;
  size_t turn = 0;
  for (auto _ : state) {
    params.weight = weights.data() + turn++ % matrices * matrix;
    kernels::cpu::gemm(params, threads(), isa);
  }
  report(state, 2.0 * rows * kSize * kSize, static_cast<double>(matrix));
}

// Qwen3-Next: 32 value heads of 128 x 128 over 16 key heads.
void gated_delta_net(benchmark::State& state, bool in_chunks) {
  const auto tokens = static_cast<int32_t>(state.range(0));
  constexpr int32_t kKeyHeads = 16, kValueHeads = 32, kDim = 128;
  constexpr int64_t kRow = (2 * kKeyHeads + kValueHeads) * kDim;
  const std::vector<float> qkv(static_cast<size_t>(tokens * kRow), 0.1f);
  const std::vector<float> gates(static_cast<size_t>(tokens) * kValueHeads, -0.1f);
  std::vector<float> states(size_t{kValueHeads} * kDim * kDim);
  std::vector<float> out(static_cast<size_t>(tokens) * kValueHeads * kDim);
  const int32_t q_indptr[] = {0, tokens}, kv_len = tokens + 1, slot = 0;
  kernels::GatedDeltaNetParams params;
  params.batch = {1, q_indptr, &kv_len, &slot};
  params.qkv = qkv.data();
  params.log_decay = params.beta = gates.data();
  params.state = states.data();
  params.out = out.data();
  params.out_token_stride = int64_t{kValueHeads} * kDim;
  params.key_heads = kKeyHeads;
  params.value_heads = kValueHeads;
  params.key_dim = params.value_dim = kDim;
  params.l2_normalise_qk = true;
  params.in_chunks = in_chunks;
  for (auto _ : state) kernels::cpu::gated_delta_net(params, threads());
  // Operations per element of the state: a dot product, decay and update, a dot product.
  report(state, 7.0 * tokens * kValueHeads * kDim * kDim, 4.0 * static_cast<double>(states.size()));
}

// 80 heads of 64 x 128 in one group.
void mamba2(benchmark::State& state, bool in_chunks) {
  const auto tokens = static_cast<int32_t>(state.range(0));
  constexpr int32_t kHeads = 80, kDim = 64, kState = 128;
  constexpr int64_t kRow = kHeads * kDim + 2 * kState;
  const std::vector<float> xbc(static_cast<size_t>(tokens * kRow), 0.1f);
  const std::vector<float> gates(static_cast<size_t>(tokens) * kHeads, -0.1f);
  std::vector<float> states(size_t{kHeads} * kDim * kState);
  std::vector<float> out(static_cast<size_t>(tokens) * kHeads * kDim);
  const int32_t q_indptr[] = {0, tokens}, kv_len = tokens + 1, slot = 0;
  kernels::Mamba2Params params;
  params.batch = {1, q_indptr, &kv_len, &slot};
  params.xbc = xbc.data();
  params.log_decay = params.dt = gates.data();
  params.state = states.data();
  params.out = out.data();
  params.out_token_stride = int64_t{kHeads} * kDim;
  params.heads = kHeads;
  params.groups = 1;
  params.head_dim = kDim;
  params.state_dim = kState;
  params.in_chunks = in_chunks;
  for (auto _ : state) kernels::cpu::mamba2(params, threads());
  report(state, 5.0 * tokens * kHeads * kDim * kState, 4.0 * static_cast<double>(states.size()));
}

// 8192 channels with states of 16, as in Falcon Mamba 7B.
void mamba1(benchmark::State& state) {
  const auto tokens = static_cast<int32_t>(state.range(0));
  constexpr int32_t kChannels = 8192, kState = 16;
  const std::vector<float> xbc(static_cast<size_t>(tokens) * (kChannels + 2 * kState), 0.1f);
  const std::vector<float> a(size_t{kChannels} * kState, -1.0f);
  const std::vector<float> dt(static_cast<size_t>(tokens) * kChannels, 0.1f);
  std::vector<float> states(a.size()), out(dt.size());
  const int32_t q_indptr[] = {0, tokens}, kv_len = tokens + 1, slot = 0;
  kernels::Mamba1Params params;
  params.batch = {1, q_indptr, &kv_len, &slot};
  params.xbc = xbc.data();
  params.a = a.data();
  params.dt = dt.data();
  params.state = states.data();
  params.out = out.data();
  params.out_token_stride = kChannels;
  params.channels = kChannels;
  params.groups = 1;
  params.state_dim = kState;
  for (auto _ : state) kernels::cpu::mamba1(params, threads());
  report(state, 7.0 * tokens * kChannels * kState, 4.0 * static_cast<double>(states.size()));
}

// 8192 channels, four taps.
void causal_conv(benchmark::State& state) {
  const auto tokens = static_cast<int32_t>(state.range(0));
  constexpr int32_t kDim = 8192, kWidth = 4;
  const std::vector<float> x(static_cast<size_t>(tokens) * kDim, 0.1f);
  const std::vector<float> weight(size_t{kDim} * kWidth, 0.1f);
  std::vector<float> states(size_t{kDim} * (kWidth - 1));
  std::vector<float> y(x.size());
  const int32_t q_indptr[] = {0, tokens}, kv_len = tokens + 1, slot = 0;
  kernels::CausalConvParams params;
  params.batch = {1, q_indptr, &kv_len, &slot};
  params.x = x.data();
  params.weight = weight.data();
  params.state = states.data();
  params.y = y.data();
  params.y_token_stride = kDim;
  params.dim = kDim;
  params.width = kWidth;
  for (auto _ : state) kernels::cpu::causal_conv(params, threads());
  report(state, 2.0 * kWidth * tokens * kDim, 8.0 * tokens * kDim);
}

// 512 tokens of 8 heads of 128, K and V.
void kv_write(benchmark::State& state, DType dtype) {
  constexpr int32_t kTokens = 512, kHeads = 8, kDim = 128;
  const std::vector<float> rows(size_t{kTokens} * kHeads * kDim, 0.1f);
  std::vector<char> cache(2 * rows.size() * dtype_bytes(dtype) * 2);
  std::vector<int64_t> slots(kTokens);
  for (int64_t i = 0; i < kTokens; ++i) slots[static_cast<size_t>(i)] = kTokens - 1 - i;
  kernels::KvWriteParams params;
  params.cache.dtype = dtype;
  params.cache.slots = kTokens;
  params.cache.k = cache.data();
  params.cache.v = cache.data() + cache.size() / 2;
  params.cache.k_page_stride = params.cache.v_page_stride = kHeads * kDim;
  params.cache.k_head_stride = params.cache.v_head_stride = kDim;
  params.k = params.v = {const_cast<float*>(rows.data()), DType::f32, kHeads * kDim, kDim};
  params.slots = slots.data();
  params.tokens = kTokens;
  params.kv_heads = kHeads;
  params.head_dim = params.head_dim_v = kDim;
  for (auto _ : state) kernels::cpu::kv_write(params, threads());
  const auto elements = 2.0 * static_cast<double>(rows.size());
  report(state, elements, elements * static_cast<double>(4 + dtype_bytes(dtype)));
}

void best_of_ten(benchmark::internal::Benchmark* cases) {
  bench::best_of_ten(cases->Unit(benchmark::kMicrosecond)->MinTime(0.1));
}

void rows(benchmark::internal::Benchmark* cases) {
  cases->Arg(1)->Arg(4)->Arg(16)->Arg(512);
  best_of_ten(cases);
}

void tokens(benchmark::internal::Benchmark* cases) {
  cases->Arg(1)->Arg(512);
  best_of_ten(cases);
}

void prompts(benchmark::internal::Benchmark* cases) {
  cases->Arg(16)->Arg(512);
  best_of_ten(cases);
}

BENCHMARK_CAPTURE(gemm, bf16_nk, DType::bf16, false)->Apply(rows);
BENCHMARK_CAPTURE(gemm, bf16_nk_without_tiles, DType::bf16, false, Isa::avx512)->Apply(rows);
BENCHMARK_CAPTURE(gemm, f32_nk, DType::f32, false)->Apply(rows);
BENCHMARK_CAPTURE(gemm, bf16_kn, DType::bf16, true)->Apply(rows);
BENCHMARK_CAPTURE(gated_delta_net, by_token, false)->Apply(tokens)->Arg(16);
BENCHMARK_CAPTURE(gated_delta_net, in_chunks, true)->Apply(prompts);
BENCHMARK_CAPTURE(mamba2, by_token, false)->Apply(tokens)->Arg(16);
BENCHMARK_CAPTURE(mamba2, in_chunks, true)->Apply(prompts);
BENCHMARK(mamba1)->Apply(tokens);
BENCHMARK(causal_conv)->Apply(tokens);
BENCHMARK_CAPTURE(kv_write, bf16, DType::bf16)->Apply(best_of_ten);
BENCHMARK_CAPTURE(kv_write, fp8_e4m3, DType::f8e4m3)->Apply(best_of_ten);

}  // namespace
}  // namespace fovea

BENCHMARK_MAIN();
