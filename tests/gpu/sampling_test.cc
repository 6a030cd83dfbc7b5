// SPDX-License-Identifier: Apache-2.0
// Tokens drawn on a GPU against those of Sampler, from the same logits and random numbers. Skipped
// without a GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "engine/sampler.h"
#include "fovea/error.h"
#include "fovea/gpu.h"
#include "gpu/gpu.h"
#include "kernels/cuda/portable/sampling/launch.h"
#include "kernels/cuda/store.h"
#include "kernels/philox.h"
#include "support/device_array.h"

namespace fovea {
namespace {

namespace cuda = kernels::cuda;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Rows of one vocabulary, and how to draw from each.
struct Rows {
  int32_t vocabulary = 0;
  std::vector<float> logits;
  std::vector<SamplingParams> params;
  std::vector<uint64_t> positions;
  std::vector<std::vector<uint64_t>> masks;  // masks of the first rows; none is empty

  std::span<const float> row(size_t i) const {
    const auto width = static_cast<size_t>(vocabulary);
    return {logits.data() + i * width, width};
  }
};

class GpuSampling : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!why_no_gpu().empty()) GTEST_SKIP() << why_no_gpu();
    context_ = std::make_unique<gpu::Context>(0);
    sampling_.emplace(context_->info().sm, cuda::kernel_store());
  }

  std::vector<int32_t> draw(const Rows& rows) {
    const size_t count = rows.params.size();
    std::vector<cuda::Draw> draws(count);
    for (size_t i = 0; i < count; ++i) {
      const SamplingParams& params = rows.params[i];
      draws[i].uniform = kernels::uniform_at(params.seed, rows.positions[i]);
      draws[i].row = static_cast<int32_t>(i);
      draws[i].top_k = params.top_k;
      draws[i].temperature = params.temperature;
      draws[i].top_p = params.top_p;
      draws[i].min_p = params.min_p;
      // Rows of masks are in another order than rows of logits.
      if (i < rows.masks.size()) draws[i].mask = static_cast<int32_t>(rows.masks.size() - 1 - i);
    }
    std::vector<uint64_t> masks;
    for (size_t i = rows.masks.size(); i-- > 0;) {
      masks.insert(masks.end(), rows.masks[i].begin(), rows.masks[i].end());
    }
    const gpu::DeviceBuffer logits = test::to_device(rows.logits),
                            on_device = test::to_device(draws),
                            tokens = test::to_device(std::vector<int32_t>(count, -2)),
                            allowed = test::to_device(masks);
    const cuda::DrawParams params{
        .logits = logits.data<float>(),
        .stride = rows.vocabulary,
        .draws = on_device.data<cuda::Draw>(),
        .tokens = tokens.data<int32_t>(),
        .vocabulary = rows.vocabulary,
        .masks = allowed.data<uint32_t>(),
        .mask_words = rows.masks.empty() ? 0 : 2 * static_cast<int64_t>(rows.masks[0].size())};
    sampling_->draw(params, static_cast<int32_t>(count), nullptr);
    return test::to_host<int32_t>(tokens, count);
  }

  // Returns the `likeliest` tokens of each row.
  std::vector<cuda::LikelyToken> find_likeliest(const Rows& rows, int32_t likeliest) {
    const size_t count = rows.params.size(), found = count * static_cast<size_t>(likeliest);
    std::vector<cuda::Draw> draws(count);
    for (size_t i = 0; i < count; ++i) draws[i].row = static_cast<int32_t>(i);
    const gpu::DeviceBuffer logits = test::to_device(rows.logits),
                            on_device = test::to_device(draws),
                            tokens = test::to_device(std::vector<int32_t>(count, -2)),
                            tops = test::to_device(std::vector<cuda::LikelyToken>(found));
    const cuda::DrawParams params{.logits = logits.data<float>(),
                                  .stride = rows.vocabulary,
                                  .draws = on_device.data<cuda::Draw>(),
                                  .tokens = tokens.data<int32_t>(),
                                  .vocabulary = rows.vocabulary,
                                  .likeliest_count = likeliest,
                                  .likeliest = tops.data<cuda::LikelyToken>()};
    sampling_->draw(params, static_cast<int32_t>(count), nullptr);
    return test::to_host<cuda::LikelyToken>(tops, found);
  }

  void expect_equal(const Rows& rows, const std::string& what) {
    const std::vector<int32_t> found = draw(rows);
    Sampler sampler(rows.vocabulary);
    for (size_t i = 0; i < found.size(); ++i) {
      const std::span<const uint64_t> mask =
          i < rows.masks.size() ? rows.masks[i] : std::span<const uint64_t>();
      const int32_t want =
          sampler.sample_allowed(rows.row(i), rows.params[i], rows.positions[i], mask);
      EXPECT_EQ(found[i], want) << what << ", row " << i;
    }
  }

  std::unique_ptr<gpu::Context> context_;
  std::optional<cuda::Sampling> sampling_;
};

std::vector<SamplingParams> many_params() {
  std::vector<SamplingParams> all;
  for (const float temperature : {0.0f, 0.1f, 0.8f, 1.0f, 3.0f, 1e-20f}) {
    for (const int32_t top_k : {0, 1, 2, 40, 1000, 1 << 24}) {
      for (const float top_p : {1.0f, 0.95f, 0.5f, 1e-6f}) {
        for (const float min_p : {0.0f, 0.05f}) {
          SamplingParams params;
          params.temperature = temperature;
          params.top_k = top_k;
          params.top_p = top_p;
          params.min_p = min_p;
          all.push_back(params);
        }
      }
    }
  }
  return all;
}

Rows random_rows(int32_t vocabulary, float deviation, size_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, deviation);
  const std::vector<SamplingParams> params = many_params();
  Rows rows{.vocabulary = vocabulary};
  rows.logits.resize(count * static_cast<size_t>(vocabulary));
  for (float& logit : rows.logits) logit = normal(random);
  for (size_t i = 0; i < count; ++i) {
    rows.params.push_back(params[i % params.size()]);
    rows.params.back().seed = seed + i;
    rows.positions.push_back(i * 7);
  }
  return rows;
}

TEST_F(GpuSampling, DrawsTheTokensOfTheCpu) {
  for (const int32_t vocabulary : {1, 2, 31, 33, 511, 2048, 5000}) {
    for (const float deviation : {0.5f, 4.0f}) {
      const size_t count = 2 * many_params().size();
      expect_equal(random_rows(vocabulary, deviation, count, 3 + vocabulary),
                   "vocabulary " + std::to_string(vocabulary));
    }
  }
  expect_equal(random_rows(151936, 2, many_params().size() / 4 + 1, 9), "vocabulary 151936");
}

// Equal logits rank by id, and so do draws where nothing is sorted.
TEST_F(GpuSampling, BreaksTiesById) {
  Rows rows = random_rows(3000, 1, 4 * many_params().size(), 5);
  for (float& logit : rows.logits) logit = std::round(logit);
  expect_equal(rows, "whole numbers");
  for (float& logit : rows.logits) logit = logit < 0 ? -0.0f : 0.0f;
  expect_equal(rows, "zeros of both signs");
}

// Also where there are ties, and fewer tokens than are wanted.
TEST_F(GpuSampling, FindsTheLikeliestTokens) {
  for (const int32_t vocabulary : {3, 700, 3000}) {
    Rows rows = random_rows(vocabulary, 3, 6, 5);
    for (size_t i = 0; i < rows.logits.size() / 2; ++i) rows.logits[i] = std::round(rows.logits[i]);
    for (const int32_t count : {1, 5, cuda::kMaxLikeliest}) {
      const std::vector<cuda::LikelyToken> found = find_likeliest(rows, count);
      Sampler sampler(vocabulary);
      for (size_t i = 0; i < rows.params.size(); ++i) {
        const std::vector<TokenLogprob> top = sampler.score(rows.row(i), 0, count).top;
        for (size_t rank = 0; rank < static_cast<size_t>(count); ++rank) {
          SCOPED_TRACE("row " + std::to_string(i) + ", rank " + std::to_string(rank));
          const cuda::LikelyToken& seen = found[i * static_cast<size_t>(count) + rank];
          if (rank >= top.size()) {
            EXPECT_EQ(seen.logprob, -kInfinity);
            continue;
          }
          EXPECT_EQ(seen.token, top[rank].token);
          EXPECT_NEAR(seen.logprob, top[rank].logprob, 2e-5);
        }
      }
    }
  }
}

TEST_F(GpuSampling, NeverDrawsMinusInfinity) {
  Rows rows = random_rows(700, 2, many_params().size(), 6);
  for (size_t i = 0; i < rows.logits.size(); ++i) {
    if (i % 3 != 1) rows.logits[i] = -kInfinity;
  }
  expect_equal(rows, "two thirds at -inf");
}

// Masks of many tokens, of few and of one; the last rows have none.
TEST_F(GpuSampling, DrawsOnlyTokensOfTheMask) {
  for (const int32_t vocabulary : {1, 33, 64, 700}) {
    Rows rows = random_rows(vocabulary, 3, many_params().size() / 4, 8);
    std::mt19937 random(11);
    for (size_t i = 0; i + 3 < rows.params.size(); ++i) {
      std::vector<uint64_t>& mask = rows.masks.emplace_back((vocabulary + 63) / 64);
      const auto allow = [&](uint64_t token) { mask[token / 64] |= uint64_t{1} << token % 64; };
      for (int32_t token = 0; token < vocabulary; ++token) {
        if (i % 3 != 0 && random() % (i % 3 == 1 ? 2 : 50) == 0) {
          allow(static_cast<uint64_t>(token));
        }
      }
      allow(i % 3 == 0 ? static_cast<uint64_t>(vocabulary) - 1
                       : random() % static_cast<uint64_t>(vocabulary));
      // The logit of a forbidden token does not matter.
      float& first = rows.logits[i * static_cast<size_t>(vocabulary)];
      if ((mask[0] & 1) == 0) first = i % 2 == 0 ? kInfinity : 50.0f;
    }
    expect_equal(rows, "vocabulary " + std::to_string(vocabulary));
  }
}

TEST_F(GpuSampling, ReportsMasksWithoutATokenThatIsPossible) {
  Rows rows = random_rows(70, 2, 2, 8);
  rows.logits[69] = -kInfinity;
  rows.masks = {{0, uint64_t{1} << 5}, {0, 0}};
  EXPECT_EQ(draw(rows), std::vector<int32_t>(2, -1));
}

// Weights of equal logits sum exactly, so the outcome at a limit is known and equals the CPU's.
TEST_F(GpuSampling, LimitsEndAtTheirBounds) {
  for (const int32_t vocabulary : {4, 600}) {
    Rows rows{.vocabulary = vocabulary};
    const auto add = [&](float top_p, float min_p, int32_t top_k, int32_t lower) {
      for (uint64_t position = 0; position < 100; ++position) {
        SamplingParams params;
        params.temperature = 0.5f;
        params.top_p = top_p;
        params.min_p = min_p;
        params.top_k = top_k;
        rows.params.push_back(params);
        rows.positions.push_back(position);
        rows.logits.resize(rows.params.size() * static_cast<size_t>(vocabulary), 2);
        std::fill_n(rows.logits.end() - lower, lower, 1.999f);
      }
    };
    for (const float top_p : {0.25f, 0.5f, 0.75f, 1.0f}) {
      for (const float min_p : {0.0f, 1.0f}) {
        for (const int32_t top_k : {0, 1, vocabulary / 2, vocabulary}) {
          add(top_p, min_p, top_k, 0);
          add(top_p, min_p, top_k, vocabulary / 2);
        }
      }
    }
    expect_equal(rows, "vocabulary " + std::to_string(vocabulary));
  }
}

TEST_F(GpuSampling, ReportsALogitThatIsNoNumberWhereverItIs) {
  constexpr int32_t kVocabulary = 1030;
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const float temperature : {0.0f, 1.0f}) {
    Rows rows{.vocabulary = kVocabulary};
    for (const float bad : {nan, -nan, kInfinity}) {
      for (const size_t at : {0, 1, 31, 32, 511, 512, 1023, 1024, 1029}) {
        for (const float other : {1.0f, -kInfinity}) {
          rows.logits.resize(rows.logits.size() + kVocabulary, other);
          *(rows.logits.end() - kVocabulary + static_cast<int64_t>(at)) = bad;
          rows.params.emplace_back().temperature = temperature;
          rows.positions.push_back(at);
        }
      }
    }
    EXPECT_EQ(draw(rows), std::vector<int32_t>(rows.params.size(), -1));
  }
}

TEST_F(GpuSampling, ReportsRowsThatAreNoDistribution) {
  for (const bool greedy : {true, false}) {
    Rows rows = random_rows(600, 2, 4, 7);
    for (SamplingParams& params : rows.params) params.temperature = greedy ? 0.0f : 1.0f;
    rows.logits[599] = std::numeric_limits<float>::quiet_NaN();
    rows.logits[600] = kInfinity;
    std::fill_n(rows.logits.begin() + 1200, 600, -kInfinity);
    const std::vector<int32_t> found = draw(rows);
    EXPECT_EQ(std::vector<int32_t>(found.begin(), found.begin() + 3), std::vector<int32_t>(3, -1));
    Sampler sampler(600);
    EXPECT_EQ(found[3], sampler.sample(rows.row(3), rows.params[3], rows.positions[3]).token);
  }
}

}  // namespace
}  // namespace fovea
