// SPDX-License-Identifier: Apache-2.0
// The runner of passes on a GPU by itself. Skipped without a GPU.
#include "engine/model_runner.h"

#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "engine/cuda_batch.h"
#include "engine/reference_text.h"
#include "engine/sampler.h"
#include "fovea/gpu.h"
#include "gpu/gpu.h"
#include "model/cuda_device.h"
#include "support/expect_error.h"

namespace fovea {
namespace {

constexpr BatchLimits kLimits = {
    .max_requests = 4, .max_tokens = 32, .max_q_len = 32, .max_kv_len = 64};

// The objects that Engine::load connects, built directly.
struct Parts {
  explicit Parts(const BatchLimits& wanted = kLimits, bool cuda_graphs = true,
                 int32_t logit_rows = 1, int32_t max_width = 1, const char* name = "llama")
      : limits(wanted) {
    registry = BackendRegistry::builtin();
    options.registry = &registry;
    options.kv_dtype = DType::bf16;
    model = load_model(model_folder(name), make_cuda_device({.max_rows = limits.max_tokens}));
    caches = std::make_unique<CacheSet>(cache_options());
    const std::vector<GroupSelection> selections = select_group_backends(
        model->info(), cache_options().groups, options, limits, find_device("cuda"));
    runner = make_model_runner(*model, *caches, threads, selections,
                               {.limits = limits,
                                .max_graph_requests = limits.max_requests,
                                .cuda_graphs = cuda_graphs,
                                .logit_rows = logit_rows,
                                .max_width = max_width,
                                .masked_draws = true});
  }

  CacheSetOptions cache_options() const {
    CacheSetOptions wanted;
    wanted.groups = cache_groups(model->info(), options);
    wanted.max_requests = limits.max_requests;
    wanted.device = {DeviceKind::cuda, 0};
    wanted.plan.pages = limits.max_requests * (limits.max_kv_len / wanted.page_size + 1);
    wanted.plan.window_pages.resize(wanted.groups.size());
    wanted.plan.max_context = limits.max_kv_len;
    return wanted;
  }

  // Returns the logits of one token of a new request.
  std::vector<float> decode(int32_t token) {
    CacheLease lease = caches->admit({{&token, 1}, {}}, false, 0).value();
    EXPECT_TRUE(caches->extend(lease, 0, 1));
    std::vector<float> logits(static_cast<size_t>(model->info().vocabulary));
    const PassPart part{{&token, 1}, 0, &lease, 1};
    int32_t drawn = 0;
    runner->run({&part, 1}, logits, {&drawn, 1});
    EXPECT_EQ(drawn, -1);
    caches->release(lease);
    return logits;
  }

  // Returns the logits of the last of these tokens, which each of the leases gets at `begin`.
  std::vector<float> append(std::span<CacheLease> leases, int32_t begin,
                            std::span<const int32_t> tokens) {
    const std::vector<std::vector<int32_t>> texts(leases.size(), {tokens.begin(), tokens.end()});
    return append_each(leases, std::vector<int32_t>(leases.size(), begin), texts);
  }

  // Returns the logits of the last token of each text, which the lease before it gets at its begin.
  std::vector<float> append_each(std::span<CacheLease> leases, std::span<const int32_t> begins,
                                 std::span<const std::vector<int32_t>> texts) {
    std::vector<PassPart> parts;
    for (size_t i = 0; i < texts.size(); ++i) {
      const int32_t end = begins[i] + static_cast<int32_t>(texts[i].size());
      EXPECT_TRUE(caches->extend(leases[i], begins[i], end));
      parts.push_back({texts[i], begins[i], &leases[i], 1});
    }
    std::vector<float> logits(parts.size() * static_cast<size_t>(model->info().vocabulary));
    std::vector<int32_t> drawn(parts.size());
    runner->run(parts, logits, drawn);
    return logits;
  }

  BatchLimits limits;
  BackendRegistry registry;
  EngineOptions options;
  ThreadPool threads{1};
  std::unique_ptr<Model> model;
  std::unique_ptr<CacheSet> caches;
  std::unique_ptr<ModelRunner> runner;
};

int32_t decode_graphs(const ModelRunner& runner) {
  return runner.stats().graphs.count() - runner.stats().graphs.chunks.graphs;
}

class GpuModelRunner : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!why_no_gpu().empty()) GTEST_SKIP() << why_no_gpu();
  }
};

// Layers that keep keys and values, or latents.
class ChunkGraphs : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (!why_no_gpu().empty()) GTEST_SKIP() << why_no_gpu();
  }
};

// Captures and warm-ups run before any batch was filled.
TEST_F(GpuModelRunner, TheFirstBatchIsEmptyAndDrawsNothing) {
  constexpr int32_t kVocabulary = 100;
  const gpu::Context context(0);
  const gpu::DeviceBuffer logits(kLimits.max_requests * kVocabulary * sizeof(float));
  gpu::fill_bytes(logits.data(), 0, logits.bytes(), nullptr);  // greedy draws would be token 0
  CudaBatch batch(kLimits, RequestTable(kLimits.max_requests + 1, kLimits.max_kv_len),
                  context.info().sm);
  const PassSize size{.requests = kLimits.max_requests,
                      .tokens = kLimits.max_requests,
                      .logit_rows = kLimits.max_requests,
                      .draw_count = kLimits.max_requests,
                      .draws = true};
  batch.draw(size, {logits.data<float>(), kVocabulary, 0, size.logit_rows}, nullptr);
  batch.return_drawn(size, nullptr);
  std::vector<int64_t> slots(kLimits.max_requests);
  gpu::copy_to_host(slots.data(), batch.view(size).out_slots.data(), slots.size() * sizeof(int64_t),
                    nullptr);
  gpu::synchronize(nullptr);
  for (size_t i = 0; i < slots.size(); ++i) {
    EXPECT_EQ(batch.drawn(batch.place(), i), -1) << i;
    EXPECT_EQ(slots[i], -1) << i;
  }
}

// The caller may change what the pass reads, so run() waits for passes that compute no logits too.
// Work before each pass keeps the GPU behind the host.
TEST_F(GpuModelRunner, PassesWithoutLogitsHaveEndedWhenRunReturns) {
  constexpr BatchLimits kPrompts = {
      .max_requests = 1, .max_tokens = 32, .max_q_len = 32, .max_kv_len = 256};
  Parts parts(kPrompts);
  std::vector<int32_t> text;
  for (int32_t i = 0; i < 160; ++i) text.push_back(3 + i * 7 % 500);
  const auto length = static_cast<int32_t>(text.size());
  const gpu::DeviceBuffer large(size_t{1} << 30);
  const auto last_logits = [&](int32_t rows_of_others) {
    CacheLease lease = parts.caches->admit({text, {}}, false, 0).value();
    std::vector<float> logits;
    for (int32_t begin = 0; begin < length; begin += kPrompts.max_tokens) {
      const int32_t end = begin + kPrompts.max_tokens;
      EXPECT_TRUE(parts.caches->extend(lease, begin, end));
      const int32_t rows = end == length ? 1 : rows_of_others;
      const auto tokens = std::span<const int32_t>(text).subspan(
          static_cast<size_t>(begin), static_cast<size_t>(kPrompts.max_tokens));
      const PassPart part{tokens, begin, &lease, rows};
      logits.resize(static_cast<size_t>(rows) *
                    static_cast<size_t>(parts.model->info().vocabulary));
      for (int i = 0; i < 8; ++i) {
        gpu::fill_bytes(large.data(), 0, large.bytes(), parts.model->device().stream());
      }
      int32_t drawn = 0;
      parts.runner->run({&part, 1}, logits, {&drawn, 1});
    }
    parts.caches->release(lease);
    return logits;
  };
  const std::vector<float> want = last_logits(1);
  EXPECT_EQ(last_logits(0), want);
}

// Steps on both sides of the limits that graphs of few requests are captured for.
TEST_F(GpuModelRunner, StepsOfShortContextsHaveTheBitsOfEnqueuedOnes) {
  constexpr BatchLimits kLong = {
      .max_requests = 3, .max_tokens = 600, .max_q_len = 200, .max_kv_len = 4200};
  Parts replayed(kLong, true), enqueued(kLong, false);
  // 1, 2, 3 requests; 2048, 4096, 4200 keys
  EXPECT_EQ(decode_graphs(*replayed.runner), 3 * 3);
  EXPECT_EQ(enqueued.runner->stats().graphs.count(), 0);
  const auto text = [](int32_t begin, int32_t end) {
    std::vector<int32_t> tokens;
    for (int32_t i = begin; i < end; ++i) tokens.push_back(3 + i * 7 % 500);
    return tokens;
  };
  for (const size_t requests : {1, 3}) {
    std::vector<CacheLease> leases[2];
    int32_t at = 0;
    const auto append = [&](int32_t end) {
      const std::vector<int32_t> tokens = text(at, end);
      const std::vector<float> logits = replayed.append(leases[0], at, tokens);
      EXPECT_EQ(enqueued.append(leases[1], at, tokens), logits) << requests << " at " << at;
      at = end;
    };
    for (size_t i = 0; i < requests; ++i) {
      const std::vector<int32_t> tokens = text(0, 1);
      leases[0].push_back(replayed.caches->admit({tokens, {}}, false, 0).value());
      leases[1].push_back(enqueued.caches->admit({tokens, {}}, false, 0).value());
    }
    for (const int32_t bound : {2048, 4096}) {
      while (at < bound - 2) append(std::min(at + 200, bound - 2));
      for (int i = 0; i < 4; ++i) append(at + 1);
    }
    for (size_t i = 0; i < requests; ++i) {
      replayed.caches->release(leases[0][i]);
      enqueued.caches->release(leases[1][i]);
    }
  }
}

// Steps of every division of few tokens among few requests: prompts alone, with decodes, in the
// first chunk and in later ones, padded to each size that graphs are captured for.
TEST_P(ChunkGraphs, HaveTheBitsOfEnqueuedSteps) {
  constexpr BatchLimits kChunks = {
      .max_requests = 20, .max_tokens = 160, .max_q_len = 128, .max_kv_len = 512};
  Parts replayed(kChunks, true, 1, 1, GetParam()), enqueued(kChunks, false, 1, 1, GetParam());
  const GraphCount chunks = replayed.runner->stats().graphs.chunks;
  EXPECT_EQ(chunks.graphs, 3 * 5);  // 1, 8, 20 requests
  EXPECT_GT(chunks.bytes, 0u);
  EXPECT_EQ(enqueued.runner->stats().graphs.count(), 0);
  const std::vector<std::vector<int32_t>> steps = {{5},
                                                   {16},
                                                   {17},
                                                   {90},
                                                   {128},
                                                   {100, 1},
                                                   {1, 1, 9},
                                                   {30, 2, 31},
                                                   {1, 40, 1, 1},
                                                   {1, 1, 1, 1, 1, 1, 1, 50},
                                                   {2, 2, 2, 2},
                                                   {1, 1, 1, 1, 1, 1, 1, 1, 20},
                                                   {7, 7, 7, 7, 7, 7, 7, 7, 7, 7}};
  std::vector<CacheLease> leases[2];
  std::vector<int32_t> lengths(20);
  const std::vector<int32_t> first = {5};
  for (size_t i = 0; i < lengths.size(); ++i) {
    leases[0].push_back(replayed.caches->admit({first, {}}, false, 0).value());
    leases[1].push_back(enqueued.caches->admit({first, {}}, false, 0).value());
  }
  for (const std::vector<int32_t>& step : steps) {
    std::vector<std::vector<int32_t>> texts;
    for (size_t i = 0; i < step.size(); ++i) {
      std::vector<int32_t> text;
      for (int32_t t = 0; t < step[i]; ++t) {
        text.push_back(3 + (lengths[i] + t) * 7 % 500 + static_cast<int32_t>(i));
      }
      texts.push_back(std::move(text));
    }
    const std::vector<float> logits = replayed.append_each(leases[0], lengths, texts);
    EXPECT_EQ(enqueued.append_each(leases[1], lengths, texts), logits)
        << ::testing::PrintToString(step);
    for (const float logit : logits) ASSERT_TRUE(std::isfinite(logit));
    for (size_t i = 0; i < step.size(); ++i) lengths[i] += step[i];
  }
  for (size_t i = 0; i < lengths.size(); ++i) {
    replayed.caches->release(leases[0][i]);
    enqueued.caches->release(leases[1][i]);
  }
}

INSTANTIATE_TEST_SUITE_P(Models, ChunkGraphs, ::testing::Values("llama", "deepseek_v3"),
                         [](const auto& test) { return std::string(test.param); });

// Three requests with chains of 4, 2 and 1 tokens: the tokens drawn after each row are those of the
// logits of that row, in a graph, and enqueued with fewer rows of logits at once than the pass has.
TEST_F(GpuModelRunner, DrawsATokenAfterEachRowOfAChain) {
  constexpr BatchLimits kChains = {
      .max_requests = 3, .max_tokens = 16, .max_q_len = 16, .max_kv_len = 64};
  constexpr int32_t kWidth = 4;
  Parts graphs(kChains, true, 16, kWidth), few_rows(kChains, false, 3, kWidth);
  EXPECT_EQ(decode_graphs(*graphs.runner), 3 * 4);  // 1, 2, 3 requests of 1 to 4 tokens
  const std::vector<int32_t> text = {5, 300, 17, 900};
  const size_t counts[] = {4, 2, 1};
  SamplingParams sampled;
  sampled.temperature = 1.5f;
  sampled.seed = 7;
  for (const SamplingParams& sampling : {SamplingParams{.temperature = 0}, sampled}) {
    for (Parts* runner : {&graphs, &few_rows}) {
      const auto width = static_cast<size_t>(runner->model->info().vocabulary);
      std::vector<CacheLease> leases;
      std::vector<PassPart> parts;
      for (const size_t count : counts) {
        const auto tokens = std::span(text).first(count);
        leases.push_back(runner->caches->admit({tokens, {}}, false, 0).value());
      }
      for (size_t i = 0; i < leases.size(); ++i) {
        const auto count = static_cast<int32_t>(counts[i]);
        EXPECT_TRUE(runner->caches->extend(leases[i], 0, count));
        parts.push_back({std::span(text).first(counts[i]), 0, &leases[i], count});
      }
      std::vector<float> logits(7 * width);
      std::vector<int32_t> none(parts.size());
      runner->runner->run(parts, logits, none);
      EXPECT_EQ(none, std::vector<int32_t>(3, -1));
      Sampler sampler(static_cast<int32_t>(width));
      std::vector<int32_t> wanted;
      for (size_t i = 0, row = 0; i < parts.size(); ++i) {
        for (size_t r = 0; r < counts[i]; ++r, ++row) {
          const auto own = std::span(logits).subspan(row * width, width);
          wanted.push_back(sampler.sample(own, sampling, r + 1).token);
        }
        parts[i].sampling = &sampling;
      }
      std::vector<int32_t> drawn(7);
      runner->runner->run(parts, {}, drawn);
      EXPECT_EQ(drawn, wanted);
      // The first and the last chain again, from every second token.
      std::vector<grammar::TokenMask> masks(
          5, grammar::TokenMask((width + 63) / 64, 0x5555555555555555));
      masks[2].clear();  // allows every token
      parts[0].masked = parts[2].masked = true;
      for (size_t row = 0, mask = 0; row < 7; ++row) {
        if (row == 4 || row == 5) continue;
        const size_t position = row < 4 ? row + 1 : 1;
        wanted[row] = sampler.sample_allowed(std::span(logits).subspan(row * width, width),
                                             sampling, position, masks[mask++]);
      }
      runner->runner->enqueue(parts);
      test::expect_invalid("wait for masks", [&] { runner->runner->collect({}, drawn); });
      test::expect_invalid("masks holds 1",
                           [&] { runner->runner->draw_masked(std::span(masks).first(1)); });
      runner->runner->draw_masked(masks);
      runner->runner->collect({}, drawn);
      EXPECT_EQ(drawn, wanted);
      for (CacheLease& lease : leases) runner->caches->release(lease);
    }
  }
}

#ifndef NDEBUG
// The pools differ from those that the graph was captured with.
TEST_F(GpuModelRunner, RefusesToReplayOverPoolsThatMoved) {
  Parts parts;
  const std::vector<float> logits = parts.decode(5);
  EXPECT_EQ(parts.decode(5), logits);
  CacheSet others(parts.cache_options());
  std::swap(*parts.caches, others);
  test::expect_invalid("k of layer 0 of layer group 0 is at", [&] { parts.decode(5); });
  std::swap(*parts.caches, others);
  EXPECT_EQ(parts.decode(5), logits);
}
#endif

}  // namespace
}  // namespace fovea
