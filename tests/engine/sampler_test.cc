// SPDX-License-Identifier: Apache-2.0
#include "engine/sampler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "fovea/error.h"
#include "kernels/philox.h"
#include "support/expect_error.h"

namespace fovea {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

SamplingParams with_temperature(float temperature) {
  SamplingParams params;
  params.temperature = temperature;
  return params;
}

std::vector<double> softmax(const std::vector<float>& logits, double temperature) {
  std::vector<double> p(logits.size());
  double sum = 0;
  for (size_t i = 0; i < p.size(); ++i) sum += p[i] = std::exp(logits[i] / temperature);
  for (double& value : p) value /= sum;
  return p;
}

std::vector<float> random_logits(size_t size, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, 2);
  std::vector<float> logits(size);
  for (float& value : logits) value = normal(random);
  return logits;
}

// Returns how often each token is drawn at `draws` positions.
std::vector<int64_t> histogram(const std::vector<float>& logits, const SamplingParams& params,
                               int draws) {
  Sampler sampler(static_cast<int32_t>(logits.size()));
  std::vector<int64_t> counts(logits.size());
  for (int i = 0; i < draws; ++i)
    ++counts[static_cast<size_t>(sampler.sample(logits, params, static_cast<uint64_t>(i)).token)];
  return counts;
}

// Expects Pearson's statistic below its mean plus five standard deviations.
void expect_distribution(const std::vector<int64_t>& counts, const std::vector<double>& p) {
  const auto draws = static_cast<double>(std::accumulate(counts.begin(), counts.end(), int64_t{0}));
  double statistic = 0;
  int freedom = -1;
  for (size_t i = 0; i < p.size(); ++i) {
    if (p[i] == 0) {
      EXPECT_EQ(counts[i], 0) << "token " << i << " is outside the distribution";
      continue;
    }
    const double difference = static_cast<double>(counts[i]) - draws * p[i];
    statistic += difference * difference / (draws * p[i]);
    ++freedom;
  }
  EXPECT_LT(statistic, freedom + 5 * std::sqrt(2.0 * std::max(freedom, 1)));
}

// Returns p with everything outside `kept` removed.
std::vector<double> renormalised(std::vector<double> p, const std::vector<bool>& kept) {
  double sum = 0;
  for (size_t i = 0; i < p.size(); ++i) sum += p[i] = kept[i] ? p[i] : 0;
  for (double& value : p) value /= sum;
  return p;
}

TEST(Philox, MatchesThePublishedVector) {
  // Random123's known answer for philox4x32-10 with zero key and counter: 6627e8d5 e169c58d ...
  EXPECT_EQ(kernels::uniform_at(0, 0), static_cast<double>(0xe169c58d6627e8d5u >> 11) * 0x1p-53);
}

TEST(Sampler, GreedyTakesTheSmallestOfEqualIds) {
  Sampler sampler(5);
  const std::vector<float> logits = {1, 3, -2, 3, 3};
  EXPECT_EQ(sampler.sample(logits, {}, 0).token, 1);
}

TEST(Sampler, TemperatureGivesSoftmax) {
  const std::vector<float> logits = random_logits(30, 1);
  for (const float temperature : {0.7f, 1.0f, 2.0f})
    expect_distribution(histogram(logits, with_temperature(temperature), 60000),
                        softmax(logits, temperature));
}

TEST(Sampler, TopKKeepsTheKMostLikely) {
  std::vector<float> logits = random_logits(40, 2);
  logits[7] = logits[9] = 50;
  logits[3] = logits[5] = logits[11] = 49;  // among three equal logits the two smallest ids stay
  SamplingParams params = with_temperature(1);
  params.top_k = 4;
  std::vector<bool> kept(logits.size());
  kept[7] = kept[9] = kept[3] = kept[5] = true;
  expect_distribution(histogram(logits, params, 40000), renormalised(softmax(logits, 1), kept));
}

TEST(Sampler, TopPKeepsTheSmallestNucleus) {
  const std::vector<float> logits = {std::log(0.4f), std::log(0.05f), std::log(0.3f),
                                     std::log(0.05f), std::log(0.2f)};
  SamplingParams params = with_temperature(1);
  params.top_p = 0.65f;  // 0.4 + 0.3 reaches it
  expect_distribution(histogram(logits, params, 40000),
                      renormalised(softmax(logits, 1), {true, false, true, false, false}));
}

TEST(Sampler, TopPOverALargeVocabularyMatchesSorting) {
  const std::vector<float> logits = random_logits(5000, 3);
  SamplingParams params = with_temperature(1.5f);
  params.top_p = 0.9f;
  const std::vector<double> p = softmax(logits, 1.5);
  std::vector<size_t> order(p.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return p[a] > p[b]; });
  std::vector<bool> kept(p.size());
  double sum = 0;
  for (const size_t token : order) {
    kept[token] = true;
    if ((sum += p[token]) >= 0.9) break;
  }
  const std::vector<int64_t> counts = histogram(logits, params, 3000);
  for (size_t i = 0; i < counts.size(); ++i)
    if (!kept[i]) {
      EXPECT_EQ(counts[i], 0) << i;
    }
}

TEST(Sampler, MinPIsRelativeToTheLargest) {
  const std::vector<float> logits = {std::log(0.5f), std::log(0.06f), std::log(0.04f),
                                     std::log(0.4f)};
  SamplingParams params = with_temperature(1);
  params.min_p = 0.1f;
  expect_distribution(histogram(logits, params, 40000),
                      renormalised(softmax(logits, 1), {true, true, false, true}));
}

// A limit keeps tokens up to its bound and no more. Weights of equal logits sum exactly.
TEST(Sampler, LimitsEndAtTheirBounds) {
  struct Limits {
    float top_p, min_p;
    int32_t top_k;
    std::vector<float> logits;
    size_t kept;  // number of first tokens
  };
  const Limits cases[] = {{0.25f, 0, 0, {2, 2, 2, 2}, 1},   {0.5f, 0, 0, {2, 2, 2, 2}, 2},
                          {0.75f, 0, 0, {2, 2, 2, 2}, 3},   {0.5f, 0, 2, {2, 2, 2, 2}, 1},
                          {1, 1, 0, {3, 3, 3, 2.999f}, 3},  {0.5f, 1, 0, {3, 3, 2, 2}, 1},
                          {1, 0, 3, {1, 1, 1, 1}, 3},       {1, 0, 4, {1, 1, 1, 1}, 4},
                          {1, 1, 2, {-1, -1, -1, -1.1f}, 2}};
  for (const Limits& limits : cases) {
    SamplingParams params = with_temperature(0.5f);
    params.top_p = limits.top_p;
    params.min_p = limits.min_p;
    params.top_k = limits.top_k;
    const std::vector<int64_t> counts = histogram(limits.logits, params, 400);
    for (size_t token = 0; token < counts.size(); ++token) {
      EXPECT_EQ(counts[token] > 0, token < limits.kept)
          << "token " << token << ", top_p " << limits.top_p << ", min_p " << limits.min_p
          << ", top_k " << limits.top_k;
    }
  }
}

TEST(Sampler, DrawsDependOnSeedAndPositionOnly) {
  const std::vector<float> logits = random_logits(100, 4);
  SamplingParams params = with_temperature(1);
  params.seed = 0xdeadbeefcafef00d;
  Sampler used(100), fresh(100);
  for (uint64_t position = 0; position < 50; ++position)
    (void)used.sample(logits, params, position);
  int different = 0;
  for (uint64_t position = 50; position-- > 0;) {
    EXPECT_EQ(used.sample(logits, params, position).token,
              fresh.sample(logits, params, position).token);
    SamplingParams other = params;
    other.seed ^= uint64_t{1} << 40;
    different +=
        used.sample(logits, other, position).token != used.sample(logits, params, position).token;
  }
  EXPECT_GT(different, 20);
}

TEST(Sampler, LogprobsAreThoseOfTheLogits) {
  const std::vector<float> logits = {0.5f, -kInfinity, 2.0f, 2.0f, -1.0f};
  SamplingParams params = with_temperature(0.3f);
  params.logprobs = 3;
  Sampler sampler(5);
  const SampledToken sampled = sampler.sample(logits, params, 0);
  const std::vector<double> p = softmax(logits, 1);
  ASSERT_EQ(sampled.top.size(), 3u);
  EXPECT_EQ(sampled.top[0].token, 2);
  EXPECT_EQ(sampled.top[1].token, 3);
  EXPECT_EQ(sampled.top[2].token, 0);
  for (const TokenLogprob& entry : sampled.top)
    EXPECT_NEAR(entry.logprob, std::log(p[static_cast<size_t>(entry.token)]), 1e-6);
  EXPECT_NEAR(sampled.logprob, std::log(p[static_cast<size_t>(sampled.token)]), 1e-6);
  EXPECT_EQ(Sampler::logprob(logits, 1), -kInfinity);
}

TEST(Sampler, RefusesLogitsWithoutADistribution) {
  Sampler sampler(3);
  const float nan = std::nanf("");
  for (const float temperature : {0.0f, 1.0f}) {
    const SamplingParams params = with_temperature(temperature);
    for (const std::vector<float>& logits : {std::vector<float>{1, nan, 2},
                                             {nan, nan, nan},
                                             {1, 2, kInfinity},
                                             {-kInfinity, -kInfinity, -kInfinity}})
      EXPECT_THROW((void)sampler.sample(logits, params, 0), Error);
  }
  EXPECT_THROW((void)Sampler::logprob(std::vector<float>{1, nan}, 0), Error);
}

TEST(Sampler, RefusesALogitThatIsNoNumberWhereverItIs) {
  const float nan = std::nanf("");
  Sampler sampler(3);
  for (const float temperature : {0.0f, 1.0f}) {
    for (const float bad : {nan, -nan, kInfinity}) {
      for (size_t at = 0; at < 3; ++at) {
        for (const float other : {1.0f, -kInfinity}) {
          std::vector<float> logits(3, other);
          logits[at] = bad;
          const std::string words = "the logit of token " + std::to_string(at) +
                                    (bad == kInfinity ? " is +inf" : " is NaN");
          test::expect_invalid(
              words, [&] { (void)sampler.sample(logits, with_temperature(temperature), 0); });
          test::expect_invalid(words, [&] { (void)Sampler::logprob(logits, 1); });
        }
      }
    }
  }
}

}  // namespace
}  // namespace fovea
