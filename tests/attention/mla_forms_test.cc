// SPDX-License-Identifier: Apache-2.0
// The two forms of MLA compared with the oracle and with each other, for any chunking of the
// context.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "attention/backends/backends.h"
#include "attention/host/mla.h"
#include "attention/validate/layer.h"
#include "kernels/cpu/isa.h"
#include "support/cases.h"
#include "support/deepseek_spec.h"
#include "support/expect_close.h"
#include "support/expect_error.h"
#include "support/run_backend.h"

namespace fovea {
namespace {

using test::AttentionCase;
using test::CaseData;
using test::Output;

// A backend that always uses one form.
BackendEntry forced(const HostKernels& kernels, const MlaOptions& options) {
  BackendEntry entry = reference_backend();
  entry.name = std::string(kernels.name);
  entry.workspace_bytes = [&kernels, options](const BackendRequest& request) {
    return host_mla_workspace_bytes({&kernels, request.spec, request.cache, request.device.cores},
                                    request.limits, options);
  };
  entry.create = [&kernels, options](const BackendContext& context) {
    return make_host_mla(kernels, context, options);
  };
  return entry;
}

std::vector<const HostKernels*> host_kernels() {
  std::vector<const HostKernels*> all = {&reference_kernels()};
  if (kernels::cpu::best_isa() != kernels::cpu::Isa::none) all.push_back(&cpu_kernels());
  return all;
}

AttentionCase weights_case(std::string name) {
  AttentionCase test = test::mla_case(std::move(name), 4);
  test.spec.mla.nope_dim = 32;
  test.spec.mla.v_dim = 24;
  test.spec.scores.softmax_scale = 0;
  test.spec.needs_lse = true;
  test.mode = ForwardMode::mixed;
  test.requests = {{1, 40}, {20, 45}, {0, 5}, {17, 17}, {1, 0}, {5, 6}, {33, 34}};
  return test;
}

std::vector<AttentionCase> weights_cases() {
  std::vector<AttentionCase> cases = {weights_case("f32")};
  AttentionCase test = weights_case("split_q_strided");
  test.split_q = test.strided = true;
  test.cache.page_size = 3;
  cases.push_back(test);
  test = weights_case("bf16_split_q");
  test.spec.q_dtype = test.cache.dtype = DType::bf16;
  test.split_q = true;
  cases.push_back(test);
  test = weights_case("fp8_rows");
  test.spec.q_dtype = DType::bf16;
  test.cache.layout = KvLayout::mla_fp8_rows;
  test.cache.dtype = DType::f8e4m3;
  cases.push_back(test);
  test = weights_case("fp8_per_token");
  test.cache.dtype = DType::f8e4m3;
  test.cache.scale = KvScale::per_token_head;
  cases.push_back(test);
  test = weights_case("fp8_per_tensor");
  test.cache.dtype = DType::f8e5m2;
  test.cache.scale = KvScale::per_tensor;
  cases.push_back(test);
  test = weights_case("logit_cap");
  test.spec.scores.logit_cap = 30;
  cases.push_back(test);
  test = weights_case("no_rope");
  test.spec.mla.rope_dim = 0;
  cases.push_back(test);
  return cases;
}

// The absorbed form in plain fp32. It sums over the whole latent, while the up-projected form,
// which the oracle computes, sums over a head; so its errors are different.
test::Expected plain_absorbed(const AttentionCase& test, const CaseData& data, size_t request) {
  const AttentionSpec& spec = test.spec;
  AttentionCase absorbed = test;
  absorbed.spec.mla.nope_dim = absorbed.spec.mla.v_dim = 0;
  absorbed.spec.scores.softmax_scale = static_cast<float>(test::softmax_scale(spec));
  absorbed.spec.q_dtype = DType::f32;
  const auto rank = static_cast<size_t>(spec.mla.kv_lora_rank);
  const auto nope = static_cast<size_t>(spec.mla.nope_dim),
             rope = static_cast<size_t>(spec.mla.rope_dim);
  const auto heads = static_cast<size_t>(spec.q_heads), width = static_cast<size_t>(spec.mla.v_dim);
  CaseData inputs = data;
  test::RequestData& one = inputs.requests[request];
  const size_t rows = static_cast<size_t>(one.q_len) * heads;
  one.q.assign(rows * (rank + rope), 0);
  for (size_t row = 0; row < rows; ++row) {
    const float* from = &data.requests[request].q[row * (nope + rope)];
    float* to = &one.q[row * (rank + rope)];
    for (size_t d = 0; d < nope; ++d) {
      const float* weight = &data.w_uk[(row % heads * nope + d) * rank];
      for (size_t r = 0; r < rank; ++r) to[r] += from[d] * weight[r];
    }
    std::copy_n(from + nope, rope, to + rank);
  }
  test::Expected plain = test::oracle(absorbed, inputs, request).plain;
  const std::vector<double> latents = std::move(plain.out);
  plain.out.assign(rows * width, 0);
  for (size_t i = 0; i < plain.out.size(); ++i) {
    const size_t row = i / width;
    const float* weight = &data.w_uv[(row % heads * width + i % width) * rank];
    float sum = 0;
    for (size_t r = 0; r < rank; ++r)
      sum += static_cast<float>(latents[row * rank + r]) * weight[r];
    plain.out[i] = sum;
  }
  return plain;
}

// Returns the oracle's result, with the plain computation of the form with the larger error.
test::OracleResult wanted_of(const AttentionCase& test, const CaseData& data, size_t request) {
  test::OracleResult want = test::oracle(test, data, request);
  const test::Expected absorbed = plain_absorbed(test, data, request);
  const auto take_worse = [](const std::vector<double>& exact, const std::vector<double>& other,
                             std::vector<double>& plain) {
    for (size_t i = 0; i < exact.size(); ++i) {
      if (std::fabs(other[i] - exact[i]) > std::fabs(plain[i] - exact[i])) plain[i] = other[i];
    }
  };
  take_worse(want.exact.out, absorbed.out, want.plain.out);
  take_worse(want.exact.lse, absorbed.lse, want.plain.lse);
  return want;
}

using Wanted = std::vector<test::OracleResult>;  // [requests]

Wanted wanted_of(const AttentionCase& test, const CaseData& data) {
  Wanted wanted;
  for (size_t request = 0; request < test.requests.size(); ++request) {
    wanted.push_back(wanted_of(test, data, request));
  }
  return wanted;
}

void expect_right(const AttentionCase& test, const Wanted& wanted, const Output& output) {
  size_t row = 0;
  const auto heads = static_cast<size_t>(test.spec.q_heads);
  const size_t width = static_cast<size_t>(test::out_width(test.spec)) * heads;
  for (size_t request = 0; request < test.requests.size(); ++request) {
    const auto rows = static_cast<size_t>(test.requests[request].q_len);
    EXPECT_TRUE(test::is_close(test.spec, wanted[request],
                               std::span(output.out).subspan(row * width, rows * width),
                               std::span(output.lse).subspan(row * heads, rows * heads)))
        << "request " << request;
    row += rows;
  }
}

class MlaForms : public ::testing::TestWithParam<AttentionCase> {};

TEST_P(MlaForms, EachMatchesTheOracle) {
  const AttentionCase& test = GetParam();
  const CaseData data = test::make_data(test);
  const Wanted wanted = wanted_of(test, data);
  for (const HostKernels* kernels : host_kernels()) {
    for (const MlaForm form : {MlaForm::absorbed, MlaForm::automatic}) {
      SCOPED_TRACE(kernels->name);
      expect_right(test, wanted,
                   test::run_case(forced(*kernels, {form, kMlaChunkRows}), test, data));
    }
    for (const int32_t chunk_rows : {1, 16, 1000}) {
      SCOPED_TRACE(std::string(kernels->name) + ", chunks of " + std::to_string(chunk_rows));
      expect_right(test, wanted,
                   test::run_case(forced(*kernels, {MlaForm::up_projected, chunk_rows}), test, data,
                                  {.fill = test::Fill::poison}));
    }
  }
}

// One head at a time, and two, also with a chunked context.
TEST_P(MlaForms, PassesBeyondTheBudgetAreCut) {
  AttentionCase test = GetParam();
  const CaseData data = test::make_data(test);
  const Wanted wanted = wanted_of(test, data);
  for (const HostKernels* kernels : host_kernels()) {
    for (const MlaForm form : {MlaForm::absorbed, MlaForm::automatic, MlaForm::up_projected}) {
      const BackendEntry entry = forced(*kernels, {form, 16});
      const auto bytes = [&](int64_t budget) {
        test.workspace_budget = budget;
        return static_cast<int64_t>(entry.workspace_bytes(
            {test.spec, test::complete_cache(test), test::limits_of(test), cpu_device()}));
      };
      const int64_t all = bytes(int64_t{1} << 30), least = bytes(0);
      // Room for half of the divisible buffers: by the budget, or by the quarter that is added to
      // buffers that cannot be divided.
      const int64_t half_budget = std::min(least + (all - least) / 2, 2 * (all - least));
      const int64_t half = bytes(half_budget);
      EXPECT_LT(least, half);
      EXPECT_LT(half, all);
      for (const int64_t budget : {int64_t{0}, half_budget}) {
        SCOPED_TRACE(std::string(kernels->name) + ", " + std::to_string(budget) + " bytes");
        test.workspace_budget = budget;
        expect_right(test, wanted, test::run_case(entry, test, data, {.fill = test::Fill::poison}));
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, MlaForms, ::testing::ValuesIn(weights_cases()),
                         [](const auto& param) { return param.param.name; });

// batch_invariant uses one form: chunking a prompt changes no bit.
TEST(MlaForms, InvariantModeIgnoresChunking) {
  AttentionCase test = weights_case("invariant");
  test.spec.batch_invariant = true;
  test.cache.dtype = DType::f8e4m3;
  test.cache.scale = KvScale::per_token_head;
  test.requests = {{64, 80}};
  const CaseData data = test::make_data(test);
  for (const HostKernels* kernels : host_kernels()) {
    const BackendEntry entry = forced(*kernels, {});
    const Output whole = test::run_case(entry, test, data);
    const std::vector<Output> parts =
        test::run_batches(entry, test, data, {{{0, 0, 20}}, {{0, 20, 21}}, {{0, 21, 64}}});
    Output joined;
    for (const Output& part : parts) {
      joined.out.insert(joined.out.end(), part.out.begin(), part.out.end());
      joined.lse.insert(joined.lse.end(), part.lse.begin(), part.lse.end());
    }
    EXPECT_TRUE(test::same_bits(whole, joined)) << kernels->name;
  }
}

TEST(MlaForms, WeightsAreBothOrNone) {
  const AttentionSpec spec{.kind = AttentionKind::mla, .mla = {.nope_dim = 128, .v_dim = 128}};
  float values[1] = {};
  const LayerTensors none{.q = dense_rows(values, DType::f32, 1, 1),
                          .out = dense_rows(values, DType::f32, 1, 1)};
  LayerTensors half = none;
  half.mla.weights.w_uk = values;
  LayerTensors both = half;
  both.mla.weights.w_uv = values;
  test::expect_invalid("mla.weights are null, but the spec's mla.nope_dim is 128",
                       [&] { validate_layer(none, spec, {}, true); });
  test::expect_invalid("mla.weights are half given, but the spec's mla.nope_dim is 128",
                       [&] { validate_layer(half, spec, {}, true); });
  EXPECT_NO_THROW(validate_layer(both, spec, {}, true));
}

// The workspace of the up-projected form is bounded by its chunk, not by the context.
TEST(MlaCost, ContextCostsNoWorkspace) {
  const AttentionCase test = weights_case("bounded");
  HostShape shape{&reference_kernels(), test.spec, test::complete_cache(test), 1};
  BatchLimits limits = test::limits_of(test);
  limits.max_kv_len = 1024;
  const size_t small = host_mla_workspace_bytes(shape, limits);
  limits.max_kv_len = 1 << 20;
  const size_t page_table = (1 << 20) / 16 * sizeof(int32_t) * limits.max_requests;
  EXPECT_LE(host_mla_workspace_bytes(shape, limits), small + page_table);
}

// explain() reports the choice of the backends.
TEST(MlaForms, AreDescribedAsChosen) {
  AttentionSpec absorbed = test::deepseek_spec();
  absorbed.mla.nope_dim = absorbed.mla.v_dim = 0;
  EXPECT_NE(describe_mla_forms(absorbed, "").find("queries come absorbed"), std::string::npos);
  AttentionSpec spec = test::deepseek_spec();
  EXPECT_EQ(describe_mla_forms(spec, "context in chunks of 512 rows"),
            "up-projected from 171 new tokens of a request on, and from 16 on where few tokens "
            "stand before them (with 93 new ones at most 56); context in chunks of 512 rows; else "
            "absorbed");
  EXPECT_EQ(choose_mla_form(spec, 170, 1 << 20), MlaForm::absorbed);
  EXPECT_EQ(choose_mla_form(spec, 171, 1 << 20), MlaForm::up_projected);
  EXPECT_EQ(choose_mla_form(spec, 93, 93 + 56), MlaForm::up_projected);
  EXPECT_EQ(choose_mla_form(spec, 93, 93 + 57), MlaForm::absorbed);
  spec.batch_invariant = true;
  EXPECT_NE(describe_mla_forms(spec, "").find("absorbed form only"), std::string::npos);
}

}  // namespace
}  // namespace fovea
