// SPDX-License-Identifier: Apache-2.0
// Dual chunk attention beyond the contract's cases: equivalent batches, angles of rotations, and
// errors.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "attention/two_requests.h"
#include "attention/validate/spec.h"
#include "support/cases.h"
#include "support/expect_close.h"
#include "support/run_backend.h"

namespace fovea {
namespace {

using test::AttentionCase;
using test::CaseData;
using test::expect_invalid;
using test::Output;

// Calls check(entry) for every backend that serves the case.
template <typename Check>
void for_each_backend(const AttentionCase& test, Check&& check) {
  const BackendRegistry registry = BackendRegistry::builtin();
  int served = 0;
  for (const BackendEntry& entry : registry.entries()) {
    if (!entry.reject(test::request_of(test)).empty()) continue;
    SCOPED_TRACE(entry.name);
    ++served;
    check(entry);
  }
  EXPECT_GT(served, 0);
}

TEST(DualChunk, EqualQueriesGiveCausalAttention) {
  const AttentionCase test = test::attention_case("dual_chunk");
  CaseData data = make_data(test);
  for (test::RequestData& request : data.requests) request.q_succ = request.q_inter = request.q;
  AttentionCase causal = test;
  causal.spec.dual_chunk = {};
  for_each_backend(test, [&](const BackendEntry& entry) {
    const Output got = run_case(entry, test, data);
    size_t row = 0;
    for (size_t request = 0; request < data.requests.size(); ++request) {
      const size_t rows = static_cast<size_t>(test.requests[request].q_len) * test.spec.q_heads;
      const std::span<const float> out(got.out), lse(got.lse);
      EXPECT_TRUE(is_close(causal.spec, oracle(causal, data, request),
                           out.subspan(row * 64, rows * 64), lse.subspan(row, rows)));
      row += rows;
    }
  });
}

TEST(DualChunk, RopeGivesTheBitsOfRotatedQueries) {
  const AttentionCase test = test::attention_case("dual_chunk_rope");
  const CaseData data = make_data(test);
  AttentionCase rotated = test;
  rotated.spec.has_rope = false;
  for_each_backend(test, [&](const BackendEntry& entry) {
    EXPECT_TRUE(same_bits(run_case(entry, test, data), run_case(entry, rotated, data)));
  });
}

// Stores only, as for caches of cross attention, and reads only, as layers that share a cache do.
TEST(DualChunk, KeysAreStoredWithoutQueriesAndSeenWithoutNewKeys) {
  const AttentionCase test = test::attention_case("dual_chunk_rope");
  const CaseData data = make_data(test);
  ThreadPool threads(2);
  for_each_backend(test, [&](const BackendEntry& entry) {
    test::PagedStore store(test, data, test::Fill::zero);
    test::BackendUnderTest under_test(entry, test, &store, threads);
    test::PackedBatch batch(test, data, &store, whole_case(test), test::Fill::zero);
    LayerTensors stored = batch.tensors(), seen = stored;
    stored.q = {};
    seen.k = seen.v = {};
    under_test.backend().plan(batch.view());
    under_test.backend().forward(stored);
    under_test.backend().forward(seen);
    EXPECT_TRUE(same_bits(batch.output(), run_case(entry, test, data)));
  });
}

// Chunks of 6: values show the weights of the keys, and these show the distances.
TEST(DualChunk, RotationsTurnNoFurtherThanAChunk) {
  AttentionCase test = test::mha_case("distances", 1, 1, 2);
  test.spec.dual_chunk = {.chunk_size = 8, .local_size = 2};
  test.spec.has_rope = true;
  test.spec.head_dim_v = 20;
  test.requests = {{20, 20}};
  CaseData data = make_data(test);
  test::RequestData& request = data.requests[0];
  for (size_t i = 0; i < 40; ++i) request.given_q[i] = request.given_k[i] = i % 2 == 0 ? 1 : 0;
  for (size_t i = 0; i < 400; ++i) request.given_v[i] = i % 21 == 0 ? 1 : 0;
  const std::vector<std::pair<size_t, std::vector<int32_t>>> distances = {
      {5, {5, 4, 3, 2, 1, 0}},
      {7, {7, 6, 5, 4, 3, 2, 1, 0}},
      {11, {8, 7, 6, 5, 4, 3, 5, 4, 3, 2, 1, 0}},
      {12, {8, 7, 6, 5, 4, 3, 6, 5, 4, 3, 2, 1, 0}},
      {19, {8, 7, 6, 5, 4, 3, 8, 7, 6, 5, 4, 3, 7, 6, 5, 4, 3, 2, 1, 0}}};
  for_each_backend(test, [&](const BackendEntry& entry) {
    const Output got = run_case(entry, test, data, {.fill = test::Fill::zero});
    for (const auto& [token, expected] : distances) {
      const auto score = [&](size_t key) { return std::cos(expected[key]) / std::sqrt(2.0); };
      double sum = 0;
      for (size_t key = 0; key <= token; ++key) sum += std::exp(score(key));
      for (size_t key = 0; key < 20; ++key) {
        const double weight = key <= token ? std::exp(score(key)) / sum : 0;
        EXPECT_NEAR(got.out[token * 20 + key], weight, 1e-6) << token << " sees " << key;
      }
    }
  });
}

TEST(DualChunk, RefusesSpecsByName) {
  AttentionSpec good{.q_heads = 4, .kv_heads = 2, .head_dim = 8, .head_dim_v = 8};
  good.dual_chunk = {.chunk_size = 8, .local_size = 7};
  EXPECT_NO_THROW(validate_spec(good));
  const std::vector<std::pair<const char*, std::function<void(AttentionSpec&)>>> wrong = {
      {"dual_chunk.chunk_size is -1", [](auto& s) { s.dual_chunk.chunk_size = -1; }},
      {"dual_chunk.local_size is -1, must be in [0, 8)",
       [](auto& s) { s.dual_chunk.local_size = -1; }},
      {"dual_chunk.local_size is 8, must be in [0, 8)",
       [](auto& s) { s.dual_chunk.local_size = 8; }},
      {"dual_chunk.local_size is 7, must be 0 where chunk_size is 0",
       [](auto& s) { s.dual_chunk.chunk_size = 0; }},
      {"dual_chunk.local_size is -1, must be 0 where chunk_size is 0",
       [](auto& s) { s.dual_chunk = {.chunk_size = 0, .local_size = -1}; }},
      {"kind is gated_delta_net, dual_chunk needs mha",
       [](auto& s) {
         s = {.kind = AttentionKind::gated_delta_net,
              .dual_chunk = s.dual_chunk,
              .linear = {.key_heads = 1, .value_heads = 1, .key_dim = 8, .value_dim = 8}};
       }},
      {"scope is encoder_cache, dual_chunk needs decoder or ragged",
       [](auto& s) { s.scope = AttentionScope::encoder_cache; }},
      {"chunk is 8, must be 0: dual_chunk", [](auto& s) { s.chunk = 8; }},
      {"mask is prefix_spans, whose keys", [](auto& s) { s.mask = MaskKind::prefix_spans; }},
  };
  for (const auto& [words, change] : wrong) {
    AttentionSpec bad = good;
    change(bad);
    expect_invalid(words, [&] { validate_spec(bad); });
  }
}

TEST(DualChunk, RefusesTensorsThatDoNotFit) {
  std::vector<float> values(5 * 2 * 8);
  const std::vector<int32_t> positions = {7, 8, 3, 4, 5}, negative = {7, -8, 3, 4, 5};
  const std::vector<int32_t> shifted = {7, 8, 13, 14, 15};
  const HeadRows two = dense_rows(values.data(), DType::f32, 2, 8);
  const HeadRows one = dense_rows(values.data(), DType::f32, 1, 8);
  const LayerTensors plain{.q = two, .k = one, .v = one, .out = two};
  LayerTensors given = plain, roped = plain;
  given.dual_chunk.q_succ = given.dual_chunk.q_inter = two;
  roped.rotary = {values.data(), values.data(), 6, 2, false, positions.data()};
  const auto expect_refused = [&](const AttentionSpec& spec, const LayerTensors& good,
                                  const auto& wrong) {
    test::TwoRequests fixture;
    fixture.spec = spec;
    fixture.create();
    fixture.backend->plan(fixture.batch);
    fixture.backend->forward(good);
    for (const auto& [words, change] : wrong) {
      LayerTensors bad = good;
      change(bad);
      expect_invalid(words, [&] { fixture.backend->forward(bad); });
    }
  };
  using Wrong = std::vector<std::pair<const char*, std::function<void(LayerTensors&)>>>;
  AttentionSpec spec = test::TwoRequests().spec;
  expect_refused(spec, plain,
                 Wrong{{"q_succ is given, but the spec's dual_chunk.chunk_size is 0",
                        [&](auto& t) { t.dual_chunk.q_succ = two; }},
                       {"q_inter is given, but the spec's dual",
                        [&](auto& t) { t.dual_chunk.q_inter = two; }}});
  spec.dual_chunk = {.chunk_size = 5, .local_size = 2};
  expect_refused(
      spec, given,
      Wrong{{"q_succ is null", [](auto& t) { t.dual_chunk.q_succ = {}; }},
            {"q_inter is null", [](auto& t) { t.dual_chunk.q_inter = {}; }},
            {"q_succ is bf16", [](auto& t) { t.dual_chunk.q_succ.dtype = DType::bf16; }}});
  spec.has_rope = true;
  expect_refused(spec, roped,
                 Wrong{{"is 5 and has_rope true", [&](auto& t) { t.dual_chunk.q_inter = two; }},
                       {"rotary.max_positions is 5, must be above the dual_chunk.chunk_size of 5",
                        [](auto& t) { t.rotary.max_positions = 5; }},
                       {"rotary.positions[1] is -8, must not be negative",
                        [&](auto& t) { t.rotary.positions = negative.data(); }},
                       {"rotary.positions[2] is 13, with dual_chunk must be the batch's, 3",
                        [&](auto& t) { t.rotary.positions = shifted.data(); }}});
}

}  // namespace
}  // namespace fovea
