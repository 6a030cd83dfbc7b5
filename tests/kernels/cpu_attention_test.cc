// SPDX-License-Identifier: Apache-2.0
// The SIMD attention of every instruction set of this processor, for all cases of the list.
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <tuple>
#include <vector>

#include "core/float_types.h"
#include "fovea/error.h"
#include "support/cases.h"
#include "support/cpu_kernel.h"
#include "support/expect_close.h"
#include "support/expect_error.h"

namespace fovea {
namespace {

using kernels::cpu::AttentionShape;
using kernels::cpu::Isa;
using test::AttentionCase;

class CpuAttention : public ::testing::TestWithParam<AttentionCase> {
 protected:
  static void expect_close(const AttentionCase& test, const std::vector<test::OracleResult>& want,
                           const test::Output& got) {
    size_t out_at = 0, lse_at = 0;
    for (size_t request = 0; request < want.size(); ++request) {
      const test::Expected& exact = want[request].exact;
      const std::span<const float> out(got.out.data() + out_at, exact.out.size());
      const std::span<const float> lse(got.lse.data() + lse_at,
                                       got.lse.empty() ? 0 : exact.lse.size());
      out_at += out.size();
      lse_at += lse.size();
      EXPECT_TRUE(is_close(test.spec, want[request], out, lse)) << "request " << request;
    }
    EXPECT_EQ(out_at, got.out.size());
  }
};

TEST_P(CpuAttention, MatchesTheOracleAmidPoisonAndForAnyThreads) {
  const AttentionCase& test = GetParam();
  const test::CaseData data = make_data(test);
  std::vector<test::OracleResult> want;
  for (size_t i = 0; i < data.requests.size(); ++i) want.push_back(oracle(test, data, i));
  for (const Isa isa : {Isa::avx2, Isa::avx512}) {
    if (!has_isa(isa)) continue;
    SCOPED_TRACE(isa_name(isa));
    const test::Output got = run_cpu_kernel(test, data, test::Fill::poison, isa, 2);
    expect_close(test, want, got);
    EXPECT_TRUE(same_bits(got, run_cpu_kernel(test, data, test::Fill::zero, isa, 1)));
    EXPECT_TRUE(same_bits(got, run_cpu_kernel(test, data, test::Fill::zero, isa, 7)));
  }
}

// Returns the cases whose queries the CPU backend accepts. Cases that test the tiles of GPUs took
// half of the time, and the contract tests have them.
std::vector<AttentionCase> cpu_cases() {
  std::vector<AttentionCase> cases = test::kernel_cases();
  std::erase_if(cases, [](const AttentionCase& test) {
    return is_fp8(test.spec.q_dtype) || test.name.starts_with("tiles_");
  });
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Cases, CpuAttention, ::testing::ValuesIn(cpu_cases()),
                         [](const auto& param) { return param.param.name; });

struct StoredHeads {
  DType dtype;
  KvOrder order = KvOrder::nhd;
  int32_t group = 3;  // q heads per kv head
  int32_t dim = 64;
};

// One sequence of stored keys. Any of its tokens can attend to them, in any batch.
class Sequence {
 public:
  static constexpr int32_t kTokens = 1301, kKvHeads = 2, kPage = 16;
  static constexpr int32_t kPages = (kTokens + kPage - 1) / kPage;

  explicit Sequence(const StoredHeads& heads)
      : heads_(heads), q_heads_(kKvHeads * heads.group), dim_(heads.dim), table_(kPages) {
    uint32_t state = 1;
    const auto fill = [&](std::vector<char>& bytes, DType to, int64_t size) {
      bytes.resize(static_cast<size_t>(size) * dtype_bytes(to));
      for (int64_t i = 0; i < size; ++i) {
        state = state * 1664525u + 1013904223u;
        store_float(bytes.data(), to, i, static_cast<float>(state >> 8) * 0x1p-22f - 2);
      }
    };
    fill(q_, DType::f32, int64_t{kTokens} * q_heads_ * dim_);
    fill(k_, heads.dtype, int64_t{kPages + 1} * kPage * kKvHeads * dim_);
    fill(v_, heads.dtype, int64_t{kPages + 1} * kPage * kKvHeads * dim_);
    for (int32_t page = 0; page < kPages; ++page) table_[page] = (page * 37) % kPages + 1;
  }

  // Tokens [begin, end) of the sequence, as one request.
  struct Part {
    int32_t begin, end;
  };

  // Returns outputs and LSE of all rows, in order.
  std::vector<float> run(const std::vector<Part>& parts, const kernels::AttentionMask& mask,
                         Isa isa, int thread_count) {
    const auto requests = static_cast<int32_t>(parts.size());
    std::vector<int32_t> q_indptr(1, 0), kv_lens, table;
    std::vector<float> q;
    for (const Part& part : parts) {
      q_indptr.push_back(q_indptr.back() + part.end - part.begin);
      kv_lens.push_back(part.end);
      table.insert(table.end(), table_.begin(), table_.end());
      const auto* from = reinterpret_cast<const float*>(q_.data());
      q.insert(q.end(), from + part.begin * q_heads_ * dim_, from + part.end * q_heads_ * dim_);
    }
    const auto rows = static_cast<size_t>(q_indptr.back()) * q_heads_;
    std::vector<float> result(rows * (dim_ + 1));
    kernels::AttentionParams params;
    params.q = dense_rows(q.data(), DType::f32, q_heads_, dim_);
    params.out = dense_rows(result.data(), DType::f32, q_heads_, dim_);
    params.lse = result.data() + rows * dim_;
    KvLayerView& cache = params.keys.cache;
    cache.dtype = heads_.dtype;
    cache.page_size = kPage;
    cache.slots = (kPages + 1) * kPage;
    cache.k = k_.data();
    cache.v = v_.data();
    cache.k_page_stride = cache.v_page_stride = kPage * kKvHeads * dim_;
    const bool hnd = heads_.order == KvOrder::hnd;
    cache.k_token_stride = cache.v_token_stride = hnd ? dim_ : kKvHeads * dim_;
    cache.k_head_stride = cache.v_head_stride = hnd ? kPage * dim_ : dim_;
    params.keys.page_table = table.data();
    params.keys.page_table_stride = kPages;
    params.requests = requests;
    params.q_indptr = q_indptr.data();
    params.kv_lens = kv_lens.data();
    params.q_heads = q_heads_;
    params.kv_heads = kKvHeads;
    params.head_dim = params.head_dim_v = dim_;
    params.scale = 0.125f;
    params.mask = mask;
    const AttentionShape shape = {isa, thread_count, q_heads_, kKvHeads, dim_, dim_};
    const BatchLimits limits = {requests, q_indptr.back(), kTokens, kTokens, 0};
    test::GuardedBuffer workspace(kernels::cpu::attention_workspace_bytes(shape, limits),
                                  test::Fill::poison);
    ThreadPool threads(thread_count);
    const auto schedule = kernels::cpu::plan_attention(shape, params, workspace.bytes());
    kernels::cpu::attention(shape, params, schedule, threads);
    return result;
  }

  // Returns row `row` of `rows` of a result.
  std::vector<float> row(const std::vector<float>& result, int32_t rows, int32_t row) const {
    const auto* out = result.data() + static_cast<size_t>(row) * q_heads_ * dim_;
    const auto* lse = result.data() + (static_cast<size_t>(rows) * dim_ + row) * q_heads_;
    std::vector<float> both(out, out + q_heads_ * dim_);
    both.insert(both.end(), lse, lse + q_heads_);
    return both;
  }

 private:
  const StoredHeads heads_;
  const int32_t q_heads_, dim_;
  std::vector<char> q_, k_, v_;
  std::vector<int32_t> table_;
};

class CpuAttentionInvariance : public ::testing::TestWithParam<std::tuple<Isa, StoredHeads>> {
 protected:
  static void check(Sequence& sequence, const kernels::AttentionMask& mask, Isa isa) {
    constexpr int32_t kTokens = Sequence::kTokens;
    const std::vector<float> whole = sequence.run({{0, kTokens}}, mask, isa, 2);
    const auto expect_same = [&](const std::vector<Sequence::Part>& parts, int threads) {
      int32_t rows = 0, at = 0;
      for (const Sequence::Part& part : parts) rows += part.end - part.begin;
      const std::vector<float> got = sequence.run(parts, mask, isa, threads);
      for (const Sequence::Part& part : parts) {
        for (int32_t token = part.begin; token < part.end; ++token, ++at) {
          const std::vector<float> a = sequence.row(got, rows, at);
          const std::vector<float> b = sequence.row(whole, kTokens, token);
          ASSERT_EQ(std::memcmp(a.data(), b.data(), a.size() * sizeof(float)), 0)
              << "token " << token << " of [" << part.begin << ", " << part.end << ")";
        }
      }
    };
    for (const int threads : {2, 7}) {
      for (const int32_t token : {0, 1, 15, 16, 127, 128, 511, 512, 513, 1024, 1300}) {
        expect_same({{token, token + 1}}, threads);  // decode, alone
      }
      if (threads == 2) continue;
      expect_same({{512, 513}, {1300, 1301}, {3, 4}, {1023, 1024}}, threads);  // decode, together
      expect_same({{0, 300}, {300, 301}, {301, 900}, {900, 1301}}, threads);   // chunked prompt
      expect_same({{1297, 1301}, {510, 517}}, threads);                        // verify
    }
  }
};

// DT-2 to DT-4: the bits of a row depend on its own tokens only.
TEST_P(CpuAttentionInvariance, NoBitDependsOnTheBatch) {
  const auto [isa, heads] = GetParam();
  if (!has_isa(isa)) GTEST_SKIP() << "this processor lacks " << isa_name(isa);
  Sequence sequence(heads);
  kernels::AttentionMask mask{.causal = 1};
  check(sequence, mask, isa);
  mask.window = 200;
  check(sequence, mask, isa);
  mask.window = 0;
  mask.chunk = 384;
  check(sequence, mask, isa);
}

// Each storage type, then bf16 caches whose decode reads pages in pairs.
constexpr StoredHeads kStoredHeads[] = {
    {DType::f32},
    {DType::bf16},
    {DType::f16},
    {DType::f8e4m3},
    {DType::bf16, KvOrder::hnd, 1, 128},
    {DType::bf16, KvOrder::hnd, 2, 64},
    {DType::bf16, KvOrder::hnd, 4, 128},
    {DType::bf16, KvOrder::hnd, 8, 256},
};

INSTANTIATE_TEST_SUITE_P(Caches, CpuAttentionInvariance,
                         ::testing::Combine(::testing::Values(Isa::avx2, Isa::avx512),
                                            ::testing::ValuesIn(kStoredHeads)),
                         [](const auto& param) {
                           const StoredHeads& heads = std::get<1>(param.param);
                           return std::string(isa_name(std::get<0>(param.param))) + "_" +
                                  std::string(dtype_name(heads.dtype)) +
                                  (heads.order == KvOrder::hnd ? "_hnd_" : "_nhd_") +
                                  std::to_string(heads.group) + "_" + std::to_string(heads.dim);
                         });

TEST(CpuAttentionErrors, NamesWhatIsWrong) {
  const AttentionShape shape = {Isa::none, 1, 1, 1, 8, 8};
  ThreadPool threads(1);
  EXPECT_THROW(kernels::cpu::attention(shape, {}, {}, threads), Error);
  const int32_t q_indptr[2] = {0, 1}, kv_lens[1] = {100000};
  kernels::AttentionParams params;
  params.requests = params.q_heads = params.kv_heads = 1;
  params.head_dim = params.head_dim_v = 8;
  params.q_indptr = q_indptr;
  params.kv_lens = kv_lens;
  const size_t bytes = kernels::cpu::attention_workspace_bytes(shape, {1, 1, 1, 100, 0});
  test::GuardedBuffer workspace(bytes, test::Fill::zero);
  test::error_of([&] { kernels::cpu::plan_attention(shape, params, workspace.bytes()); },
                 ErrorCode::workspace_too_small);
}

}  // namespace
}  // namespace fovea
