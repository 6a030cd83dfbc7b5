// SPDX-License-Identifier: Apache-2.0
// The prefill of gated delta net and of KDA by itself: outputs and states against fp64, nothing
// written for others, and the same bits in any batch.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "core/float_types.h"
#include "gpu/gdn_prefill_cases.h"
#include "kernels/cuda/sm90/chunk_common/launch.h"
#include "support/device_array.h"
#include "support/error_budget.h"
#include "support/gpu_kernel_test.h"

namespace fovea::kernels::cuda {
namespace {

using test::to_device;
using test::to_host;

constexpr float kUntouched = 12345;
bool is_untouched(float value) { return value == kUntouched; }
constexpr int32_t kSpare = 70;  // tokens behind those of a batch

struct Results {
  std::vector<float> out, states;
};

class GdnPrefillTest : public test::GpuKernelTest<::testing::TestWithParam<Case>, 90> {
 protected:
  // A layer in device memory. Tokens beyond the batch belong to nobody and are NaN.
  struct Layer {
    gpu::DeviceBuffer q, k, v, log_decay, beta, states, out;
    size_t out_size, states_size;

    explicit Layer(const Batch& batch) : states_size(batch.states.size()) {
      const Case& test = GetParam();
      const auto spared = [&](auto values, int32_t width, auto nan) {
        values.insert(values.end(), static_cast<size_t>(int64_t{kSpare} * width), nan);
        return to_device(values);
      };
      const uint16_t nan = float_to_bf16(kNan);
      q = spared(batch.q, test.key_heads * kDim, nan);
      k = spared(batch.k, test.key_heads * kDim, nan);
      v = spared(batch.v, test.value_heads * kDim, nan);
      log_decay = spared(batch.log_decay, test.decays(), kNan);
      beta = spared(batch.beta, test.value_heads, kNan);
      states = to_device(batch.states);
      out_size = static_cast<size_t>(int64_t{batch.tokens() + kSpare} * test.value_heads * kDim);
      out = to_device(std::vector<float>(out_size, kUntouched));
    }
    ChunkPrefillTensors tensors() {
      const Case& test = GetParam();
      ChunkPrefillTensors tensors = {.q = q.data(), .k = k.data(), .v = v.data()};
      tensors.q_token_stride = tensors.k_token_stride = int64_t{test.key_heads} * kDim;
      tensors.v_token_stride = tensors.out_token_stride = int64_t{test.value_heads} * kDim;
      tensors.log_decay = log_decay.data<float>();
      tensors.strength = beta.data<float>();
      tensors.state = states.data<float>();
      tensors.state_slot_stride = state_size(test);
      tensors.out = out.data<float>();
      tensors.scale = 1 / std::sqrt(static_cast<float>(kDim));
      tensors.l2_normalise_qk = test.l2_normalise;
      return tensors;
    }
    // Replaces the inputs and states by those of a batch with as many tokens or fewer.
    void fill(const Batch& batch) {
      const auto copy = [](const gpu::DeviceBuffer& to, const auto& from) {
        gpu::copy_to_device(to.data(), from.data(), from.size() * sizeof(from[0]), nullptr);
      };
      copy(q, batch.q);
      copy(k, batch.k);
      copy(v, batch.v);
      copy(log_decay, batch.log_decay);
      copy(beta, batch.beta);
      copy(states, batch.states);
    }
    Results results() const {
      return {to_host<float>(out, out_size), to_host<float>(states, states_size)};
    }
  };

  ChunkPrefillSetup setup() const {
    const Case& test = GetParam();
    return {.kind = test.is_kda ? RecurrenceKind::kda : RecurrenceKind::delta,
            .key_heads = test.key_heads,
            .value_heads = test.value_heads,
            .key_dim = kDim,
            .value_dim = kDim,
            .min_tokens = test.min_tokens,
            .sm = context->info().sm,
            .multiprocessors = context->info().cores,
            .cuts_short_requests = test.cuts == Cuts::of_all};
  }

  // Runs layers of one pass, whose requests are the same.
  std::vector<Results> run_layers(std::span<const Batch> batches) {
    const Case& test = GetParam();
    const Batch& batch = batches.front();
    const auto spans = to_device(spans_of(test, batch));
    const ChunkPrefillSetup setup = this->setup();
    const ChunkPrefill prefill(setup, *store);
    const size_t bytes =
        ChunkPrefill::workspace_bytes(setup, batch.tokens() + kSpare, batch.requests());
    const auto workspace = to_device(std::vector<uint8_t>(bytes, 0xff));
    const ChunkPrefillBatch view = {.spans = spans.data<StateSpan>(),
                                    .requests = batch.requests(),
                                    .tokens = batch.tokens() + kSpare};
    std::vector<Layer> layers(batches.begin(), batches.end());
    prefill.plan(view, workspace.data(), nullptr);
    for (Layer& layer : layers) prefill.run(view, layer.tensors(), workspace.data(), nullptr);
    gpu::synchronize(nullptr);
    std::vector<Results> results;
    for (const Layer& layer : layers) results.push_back(layer.results());
    return results;
  }
  Results run(const Batch& batch) { return run_layers({&batch, 1}).front(); }

  static std::span<const float> out_rows(const Results& results, int32_t first, int32_t count) {
    const auto width = static_cast<size_t>(GetParam().value_heads * kDim);
    return std::span(results.out)
        .subspan(static_cast<size_t>(first) * width, static_cast<size_t>(count) * width);
  }
  static std::span<const float> state(const std::vector<float>& states, int32_t slot) {
    const auto size = static_cast<size_t>(state_size(GetParam()));
    return std::span(states).subspan(static_cast<size_t>(slot) * size, size);
  }

  // Checks outputs and the state of one request against fp64.
  void expect_right(const Batch& batch, const Results& results, size_t request) {
    const Case& test = GetParam();
    const int32_t begin = batch.q_indptr[request];
    const int32_t tokens = batch.q_indptr[request + 1] - begin;
    for (const int32_t head : {0, test.value_heads - 1}) {
      const HeadResult want = exact(test, batch, request, head, false);
      const HeadResult plain = exact(test, batch, request, head, true);
      const auto row = [](const std::vector<double>& rows, int32_t i) {
        return std::span(rows).subspan(static_cast<size_t>(i) * kDim, kDim);
      };
      double plain_out = 0, plain_state = 0;
      for (int32_t i = 0; i < tokens; ++i)
        plain_out = std::max(plain_out, row_error(row(plain.out, i), row(want.out, i)));
      for (int32_t i = 0; i < kDim; ++i)
        plain_state = std::max(plain_state, row_error(row(plain.state, i), row(want.state, i)));
      const auto allowed = [](double plain_error) {
        return test::kBf16Budget.times_plain * plain_error +
               test::kBf16Budget.units * test::kBf16Budget.unit;
      };
      double worst_out = 0, worst_state = 0;
      for (int32_t i = 0; i < tokens; ++i) {
        std::vector<double> got;
        for (int32_t n = 0; n < kDim; ++n) {
          got.push_back(results.out[static_cast<size_t>(
              (int64_t{begin + i} * test.value_heads + head) * kDim + n)]);
        }
        const double error = row_error(got, row(want.out, i));
        worst_out = std::max(worst_out, error);
        ASSERT_LE(error, allowed(plain_out))
            << "request " << request << " head " << head << " token " << i << " of " << tokens;
      }
      for (int32_t i = 0; i < kDim; ++i) {
        const auto got = state(results.states, batch.slots[request])
                             .subspan(static_cast<size_t>(int64_t{head} * kDim + i) * kDim, kDim);
        const double error =
            row_error(std::vector<double>(got.begin(), got.end()), row(want.state, i));
        worst_state = std::max(worst_state, error);
        ASSERT_LE(error, allowed(plain_state))
            << "request " << request << " head " << head << " row " << i << " of the state";
      }
      RecordProperty("out_error", std::to_string(worst_out));
      RecordProperty("plain_out_error", std::to_string(plain_out));
      RecordProperty("state_error", std::to_string(worst_state));
      RecordProperty("plain_state_error", std::to_string(plain_state));
    }
  }
};

template <typename T>
bool same_bits(std::span<const T> a, std::span<const T> b) {
  return a.size() == b.size() &&
         std::equal(std::as_bytes(a).begin(), std::as_bytes(a).end(), std::as_bytes(b).begin());
}

TEST_P(GdnPrefillTest, AgreesWithFp64) {
  const Case& test = GetParam();
  const Batch batch = make_batch(test);
  const Results results = run(batch);
  for (size_t i = 0; i < test.requests.size(); ++i) {
    const Request& request = test.requests[i];
    const auto rows = out_rows(results, batch.q_indptr[i], request.tokens);
    if (!in_chunks(test, request.tokens, request.padding)) {
      EXPECT_TRUE(std::ranges::all_of(rows, is_untouched)) << "request " << i;
      if (!request.padding) {
        EXPECT_TRUE(
            same_bits(state(results.states, batch.slots[i]), state(batch.states, batch.slots[i])))
            << "request " << i;
      }
    } else if (test.is_compared(i)) {
      expect_right(batch, results, i);
    }
  }
  EXPECT_TRUE(std::ranges::all_of(out_rows(results, batch.tokens(), kSpare), is_untouched));
  EXPECT_TRUE(same_bits(state(results.states, 0), state(batch.states, 0)));  // nobody's
}

// A request by itself, and in two pieces of which the first has whole chunks. Requests that are cut
// into segments may change with what the batch leaves idle.
TEST_P(GdnPrefillTest, OtherRequestsAndPiecesChangeNoBit) {
  const Case& test = GetParam();
  if (test.cuts != Cuts::none) GTEST_SKIP() << "requests are cut";
  const Batch batch = make_batch(test);
  const Results together = run(batch);
  for (size_t i = 0; i < test.requests.size(); ++i) {
    const int32_t tokens = test.requests[i].tokens;
    if (tokens < test.min_tokens + kChunkTokens || test.requests[i].padding) continue;
    if (!test.is_compared(i)) continue;
    const int32_t slot = batch.slots[i];
    const auto rows = out_rows(together, batch.q_indptr[i], tokens);
    const size_t only[] = {i};
    const Results alone = run(part_of(test, batch, only, 0, tokens));
    EXPECT_TRUE(same_bits(rows, out_rows(alone, 0, tokens))) << "request " << i;
    EXPECT_TRUE(same_bits(state(together.states, slot), state(alone.states, slot)))
        << "request " << i;
    const int32_t cut = tokens / 2 / kChunkTokens * kChunkTokens;
    if (cut < test.min_tokens) continue;
    const Results first = run(part_of(test, batch, only, 0, cut));
    Batch rest = part_of(test, batch, only, cut, tokens);
    rest.states = first.states;
    const Results second = run(rest);
    const auto width = static_cast<size_t>(test.value_heads * kDim);
    EXPECT_TRUE(same_bits(rows.first(static_cast<size_t>(cut) * width), out_rows(first, 0, cut)))
        << "request " << i;
    EXPECT_TRUE(same_bits(rows.subspan(static_cast<size_t>(cut) * width),
                          out_rows(second, 0, tokens - cut)))
        << "request " << i;
    EXPECT_TRUE(same_bits(state(together.states, slot), state(second.states, slot)))
        << "request " << i;
  }
}

// The second layer begins with what the first one left in the workspace.
TEST_P(GdnPrefillTest, LayersOfAPassShareThePlan) {
  const Case& test = GetParam();
  const Batch batches[] = {make_batch(test, 5), make_batch(test, 6)};
  const std::vector<Results> together = run_layers(batches);
  for (size_t i = 0; i < together.size(); ++i) {
    const Results alone = run(batches[i]);
    EXPECT_TRUE(
        same_bits(std::span<const float>(together[i].out), std::span<const float>(alone.out)))
        << "layer " << i;
    EXPECT_TRUE(
        same_bits(std::span<const float>(together[i].states), std::span<const float>(alone.states)))
        << "layer " << i;
  }
}

// Passes of other requests, of up to as many tokens. The workspace keeps what each one leaves.
TEST_P(GdnPrefillTest, GraphsServeOtherRequests) {
  const Case& test = GetParam();
  const Batch largest = make_batch(test);
  std::vector<size_t> all(test.requests.size());
  std::iota(all.begin(), all.end(), size_t{0});
  const int32_t longest = std::ranges::max(test.requests, {}, &Request::tokens).tokens;
  const Batch batches[] = {largest, part_of(test, largest, all, 0, longest / 2),
                           part_of(test, largest, std::span(all).first(1), 0, longest), largest};
  const ChunkPrefill prefill(setup(), *store);
  const ChunkPrefillBatch view = {.requests = largest.requests(), .tokens = largest.tokens()};
  const size_t bytes = ChunkPrefill::workspace_bytes(setup(), view.tokens, view.requests);
  const auto workspace = to_device(std::vector<uint8_t>(bytes, 0xff));
  Layer layer(largest);
  const auto spans = to_device(std::vector<StateSpan>(all.size()));
  const gpu::OwnedStream stream;
  const gpu::Graph graph = gpu::Graph::capture(stream.get(), [&](Stream captured) {
    ChunkPrefillBatch batch = view;
    batch.spans = spans.data<StateSpan>();
    prefill.plan(batch, workspace.data(), captured);
    prefill.run(batch, layer.tensors(), workspace.data(), captured);
  });
  for (const Batch& batch : batches) {
    std::vector<StateSpan> own = spans_of(test, batch);
    own.resize(all.size());
    layer.fill(batch);
    gpu::copy_to_device(spans.data(), own.data(), own.size() * sizeof(StateSpan), nullptr);
    gpu::synchronize(nullptr);
    graph.launch(stream.get());
    gpu::synchronize(stream.get());
    const Results results = layer.results();
    for (size_t i = 0; i < batch.slots.size(); ++i) {
      const int32_t tokens = batch.q_indptr[i + 1] - batch.q_indptr[i];
      if (!in_chunks(test, tokens, batch.slots[i] < 0) || !test.is_compared(i)) continue;
      expect_right(batch, results, i);
    }
  }
}

std::vector<Case> cases() {
  // small_: for the emulator. Padding between requests, so that the rows after a request are NaN.
  std::vector<Case> cases = {
      {"small_ragged", 1, 2, {{70}, {40, false, true}, {0}, {1}, {130, true}, {64}}},
      {"small_given_norms", 2, 2, {{100, true}, {3, true, true}, {17}}, false},
      {"small_strong_decay", 1, 1, {{150, true}}, true, 80},
      {"small_negative_eigenvalues", 1, 1, {{192}}, true, 0.01f, 2},
      {"small_min_tokens", 1, 3, {{63}, {64, true}, {65}, {9, false, true}}, true, 0.2f, 1, 64},
      {"qwen3_next", 16, 32, {{1000}, {5, true}, {300, true}}},
      {"long", 4, 8, {{2050, true}}, true, 0.2f, 1, 1, false, Cuts::of_long_ones},
      {"many_requests", 2, 8, std::vector<Request>(300, Request{66, true})},
      {"share_of_eight", 1, 8, {{500}}}};
  const size_t count = cases.size();
  for (size_t i = 0; i < count; ++i) {
    Case test = cases[i];
    test.is_kda = true;
    test.name += "_kda";
    cases.push_back(test);
  }
  // From decays that keep nothing over a few tokens to those that keep nearly all.
  cases.push_back({"small_some_decay_kda", 1, 1, {{130, true}}, true, 5, 1, 1, true});
  cases.push_back({"small_weak_decay_kda", 1, 1, {{130, true}}, true, 0.01f, 1, 1, true});
  // In segments: with one head of values and room for eight walks; borders and rests of all kinds,
  // and requests that stay whole.
  for (const bool is_kda : {false, true}) {
    const auto add = [&](const char* name, std::vector<Request> requests, float decay, float beta,
                         int32_t heads = 1) {
      cases.push_back({std::string(name) + (is_kda ? "_kda" : ""), heads, heads,
                       std::move(requests), true, decay, beta, 1, is_kda, Cuts::of_all});
    };
    add("small_cut", {{64 * 5 + 10, true}}, 0.2f, 1);
    add("small_cut_of_whole_chunks", {{64 * 3}}, 0.01f, 1);
    add("small_cut_strong_decay", {{64 * 4 + 1, true}}, 80, 1);
    add("small_cut_weak_decay", {{64 * 12 - 1, true}}, 1e-3f, 2);
    add("small_cut_mixture",
        {{64 * 5, true}, {1, true}, {40, true, true}, {64 * 3 + 5}, {70, true}, {0}}, 0.1f, 1);
    add("small_cut_two_heads", {{64 * 4 + 30, true}}, 0.1f, 1, 2);
    add("cut_long", {{64 * 40 + 3, true}}, 1e-3f, 1, 4);
    add("cut_many", std::vector<Request>(20, Request{64 * 9 + 5, true}), 0.05f, 1, 2);
  }
  cases.push_back({"kimi_linear", 32, 32, {{700, true}, {5}, {64}}, true, 1, 1, 1, true});
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Cases, GdnPrefillTest, ::testing::ValuesIn(cases()),
                         [](const ::testing::TestParamInfo<Case>& test) {
                           return test.param.name;
                         });

}  // namespace
}  // namespace fovea::kernels::cuda
