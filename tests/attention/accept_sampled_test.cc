// SPDX-License-Identifier: Apache-2.0
// Acceptance by probabilities has exactly the distribution of the model: chi-square tests of the
// accepted tokens, for chains and trees, for drafts that were drawn and drafts that were chosen. On
// a GPU (FOVEA_TEST_DEVICE=cuda) also the tokens of the CPU.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "kernels/philox.h"
#include "support/draft_trees.h"

namespace fovea {
namespace {

using test::DraftTree;
using test::Shared;
using test::SpeculationFixture;

class Sampled : public SpeculationFixture {};

constexpr int32_t kVocabulary = 6;
using Distribution = std::array<double, kVocabulary>;

// A model whose next token depends on the last one. `sharpness` 0: all tokens are equally likely.
struct BigramModel {
  BigramModel(double sharpness, uint32_t seed) {
    std::mt19937 random(seed);
    std::normal_distribution<double> normal(0, sharpness);
    for (Distribution& next : after) {
      double sum = 0;
      for (double& p : next) sum += p = std::exp(normal(random));
      for (double& p : next) p /= sum;
    }
    after[1] = {0, 0.5, 0, 0, 0.5, 0};  // tokens that cannot follow
  }
  std::array<Distribution, kVocabulary> after;
};

int32_t draw(const Distribution& p, std::mt19937& random) {
  return std::discrete_distribution<int32_t>(p.begin(), p.end())(random);
}

enum class Proposal { drawn, chosen };

struct Trial {
  const char* name;
  int32_t width;
  std::vector<int32_t> parents;
  Proposal proposal;
  bool repeats = false;  // node 2 has the token of node 1, so it cannot have been drawn
};

const std::vector<Trial>& trials() {
  static const std::vector<int32_t> chain = {-1, 0, 1, 2}, tree = {-1, 0, 0, 0, 1, 1, 2, 3, 3, 3};
  static const std::vector<Trial> all = {{"chain_drawn", 4, chain, Proposal::drawn},
                                         {"chain_chosen", 4, chain, Proposal::chosen},
                                         {"tree_drawn", 10, tree, Proposal::drawn},
                                         {"tree_chosen", 10, tree, Proposal::chosen},
                                         {"repeated", 4, {-1, 0, 0, 0}, Proposal::drawn, true}};
  return all;
}

// Requests of one tree, with children drawn one after the other without replacement, or chosen:
// then the most likely tokens of `draft`, the second one first.
DraftTree propose(const Trial& trial, const BigramModel& draft, int32_t requests, uint32_t seed) {
  std::mt19937 random(seed);
  DraftTree trees(requests, trial.width, random);
  for (int32_t request = 0; request < requests; ++request) {
    trees.lens[request] = request % 7;
    for (int32_t node = 0; node < trial.width; ++node) {
      trees.parents[trees.at(request, node)] = trial.parents[node];
    }
    trees.tokens[trees.at(request, 0)] = 0;
    for (int32_t parent = 0; parent < trial.width; ++parent) {
      Distribution q = draft.after[trees.tokens[trees.at(request, parent)]];
      for (const int32_t child : trees.children(request, parent)) {
        double left = 0;
        for (const double p : q) left += p;
        // A distribution may have fewer tokens than the node has children.
        int32_t token = 0;
        if (trial.proposal == Proposal::drawn && left > 0) token = draw(q, random);
        if (trial.proposal == Proposal::chosen) token = (child + request) % kVocabulary;
        if (trial.repeats && child == 2) token = trees.tokens[trees.at(request, 1)];
        q[token] = 0;
        trees.tokens[trees.at(request, child)] = token;
      }
    }
  }
  return trees;
}

// [nodes, kVocabulary], after each node.
std::vector<float> rows_of(const BigramModel& model, const DraftTree& trees) {
  std::vector<float> rows;
  for (const int32_t token : trees.tokens) {
    for (const double p : model.after[token]) rows.push_back(static_cast<float>(p));
  }
  return rows;
}

struct Outcome {
  std::vector<int32_t> counts, nodes, tokens, bonus;
};

Outcome accept(Speculation& spec, DraftTree& trees, const std::vector<float>& target,
               const std::vector<float>& draft, int32_t vocabulary) {
  std::vector<uint64_t> seeds(static_cast<size_t>(trees.requests));
  for (size_t i = 0; i < seeds.size(); ++i) seeds[i] = 1000 + i * 77;
  Shared<uint64_t> shared_seeds(seeds);
  Shared<float> p(target), q(draft);
  const auto requests = static_cast<size_t>(trees.requests);
  Shared<int32_t> counts(requests), nodes(trees.nodes()), tokens(trees.nodes()), bonus(requests);
  TargetProbabilities probabilities{.vocabulary = vocabulary,
                                    .row_stride = vocabulary,
                                    .target = p.view(),
                                    .seeds = shared_seeds.view()};
  if (!draft.empty()) probabilities.draft = q.view();
  spec.accept(trees.view(), probabilities,
              {counts.view(), nodes.view(), tokens.view(), bonus.view()});
  return {counts.read(), nodes.read(), tokens.read(), bonus.read()};
}

// Checks a chi-square statistic: its mean is `freedom`, its variance twice that. The bound is
// passed by chance once in 10^5 runs at most; random numbers are fixed.
void expect_distribution(const std::array<int64_t, kVocabulary>& counts, const Distribution& p,
                         const std::string& what) {
  int64_t total = 0;
  for (const int64_t count : counts) total += count;
  double statistic = 0;
  int freedom = -1;
  for (int32_t token = 0; token < kVocabulary; ++token) {
    const double expected = p[token] * static_cast<double>(total);
    if (p[token] == 0) {
      EXPECT_EQ(counts[token], 0) << what << ", token " << token;
      continue;
    }
    ++freedom;
    statistic += std::pow(static_cast<double>(counts[token]) - expected, 2) / expected;
  }
  ASSERT_GT(total, 200) << what;
  EXPECT_LT(statistic, freedom + 6 * std::sqrt(2.0 * freedom)) << what;
}

// Returns the share of requests whose first draft was accepted.
double check_trial(Speculation& spec, const Trial& trial, const BigramModel& target,
                   const BigramModel& draft, int32_t requests) {
  DraftTree trees = propose(trial, draft, requests, 5);
  const bool drawn = trial.proposal == Proposal::drawn;
  const Outcome outcome = accept(spec, trees, rows_of(target, trees),
                                 drawn ? rows_of(draft, trees) : std::vector<float>(), kVocabulary);
  // Token i after the tokens before it: counts by depth and last token.
  std::array<std::array<std::array<int64_t, kVocabulary>, kVocabulary>, 2> counts{};
  int64_t accepted = 0;
  for (int32_t request = 0; request < requests; ++request) {
    const int32_t count = outcome.counts[request];
    accepted += count > 1;
    int32_t last = 0;
    for (int32_t i = 0; i < std::min(count, 2); ++i) {
      const int32_t token = outcome.tokens[trees.at(request, i)];
      ++counts[i][last][token];
      last = token;
    }
    EXPECT_EQ(outcome.bonus[request], outcome.tokens[trees.at(request, count - 1)]);
  }
  expect_distribution(counts[0][0], target.after[0], std::string(trial.name) + ", first token");
  for (int32_t last = 0; last < kVocabulary; ++last) {
    int64_t total = 0;
    for (const int64_t count : counts[1][last]) total += count;
    if (total < 500) continue;
    expect_distribution(counts[1][last], target.after[last],
                        std::string(trial.name) + ", after token " + std::to_string(last));
  }
  return static_cast<double>(accepted) / requests;
}

TEST_F(Sampled, TokensHaveTheDistributionOfTheModel) {
  const int32_t requests = test::on_gpu() ? 1000 : 60000;
  const BigramModel target(1.0, 1), draft(1.0, 2);
  for (const Trial& trial : trials()) {
    const auto spec = make({.max_requests = 60000, .width = trial.width}, {});
    const double share = check_trial(*spec, trial, target, draft, requests);
    if (trial.parents[2] == 0 || trial.proposal != Proposal::drawn) continue;
    // A drawn draft is accepted with the probability sum min(p, q), the largest there can be.
    double most = 0;
    for (int32_t token = 0; token < kVocabulary; ++token) {
      most += std::min(target.after[0][token], draft.after[0][token]);
    }
    EXPECT_NEAR(share, most, 4 * std::sqrt(most * (1 - most) / requests));
  }
}

TEST_F(Sampled, ADraftOfTheModelItselfIsAlwaysAccepted) {
  const BigramModel model(1.0, 1);
  const Trial& trial = trials()[0];
  const auto spec = make({.max_requests = 500, .width = trial.width}, {});
  EXPECT_EQ(check_trial(*spec, trial, model, model, 500), 1);
}

// Without drafts the token is the one that its random number draws in the order of tokens.
TEST_F(Sampled, RootsAloneDrawByTheirNumber) {
  const BigramModel model(1.0, 3);
  std::mt19937 random(1);
  constexpr int32_t kRequests = 300;
  const auto spec = make({.max_requests = kRequests, .width = 1}, {});
  DraftTree trees(kRequests, 1, random);
  for (int32_t request = 0; request < kRequests; ++request) {
    trees.tokens[request] = request % kVocabulary;
    trees.lens[request] = request;
  }
  const Outcome outcome = accept(*spec, trees, rows_of(model, trees), {}, kVocabulary);
  for (int32_t request = 0; request < kRequests; ++request) {
    const auto seed = static_cast<uint64_t>(1000 + request * 77);
    double rest = kernels::uniform_at(seed, static_cast<uint64_t>(request) + 1);
    int32_t token = 0;
    const Distribution& p = model.after[trees.tokens[request]];
    while (token + 1 < kVocabulary && rest >= p[token]) rest -= p[token++];
    EXPECT_EQ(outcome.bonus[request], token) << request;
  }
}

TEST_F(Sampled, RowsThatAreNoDistributionGiveNoToken) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  for (const std::vector<float>& row : {std::vector<float>{0, 0, 0, 0, 0, 0},
                                        std::vector<float>{kNan, kNan, kNan, kNan, kNan, kNan}}) {
    std::mt19937 random(1);
    DraftTree trees(1, 2, random);
    trees.parents = {-1, 0};
    trees.tokens = {0, 3};
    std::vector<float> rows = row;
    rows.insert(rows.end(), row.begin(), row.end());
    const auto spec = make({.max_requests = 1, .width = 2}, {});
    const Outcome outcome = accept(*spec, trees, rows, {}, kVocabulary);
    EXPECT_EQ(outcome.counts[0], 1);
    EXPECT_EQ(outcome.bonus[0], -1);
  }
}

// Sums of a GPU run in another order, which double precision hides.
TEST_F(Sampled, EveryDeviceGivesTheTokensOfTheCpu) {
  if (!test::on_gpu()) GTEST_SKIP() << "the CPU's are tested above";
  std::mt19937 random(9);
  for (const int32_t vocabulary : {1, 5, 33, 1000, 4200, 17000}) {
    constexpr int32_t kRequests = 6, kWidth = 12;
    DraftTree trees(kRequests, kWidth, random);
    trees.lens[3] = -1;
    std::vector<float> p(trees.nodes() * static_cast<size_t>(vocabulary)), q = p;
    for (std::vector<float>* rows : {&p, &q}) {
      for (size_t row = 0; row < trees.nodes(); ++row) {
        float* const values = rows->data() + row * static_cast<size_t>(vocabulary);
        double sum = 0;
        for (int32_t i = 0; i < vocabulary; ++i) {
          values[i] = random() % 3 == 0 ? 0 : static_cast<float>(random() % 1000 + 1);
          sum += values[i];
        }
        if (sum == 0) sum = values[0] = 1;
        for (int32_t i = 0; i < vocabulary; ++i) values[i] = static_cast<float>(values[i] / sum);
      }
    }
    for (int32_t& token : trees.tokens) {
      token = static_cast<int32_t>(random() % static_cast<uint32_t>(vocabulary));
    }
    const auto spec = make({.max_requests = kRequests, .width = kWidth}, {});
    for (const std::vector<float>& draft : {q, std::vector<float>()}) {
      const Outcome found = accept(*spec, trees, p, draft, vocabulary);
      ThreadPool threads(1);
      const auto host = make_speculation({kRequests, kWidth}, {}, {}, &threads);
      std::vector<int32_t> counts(kRequests), nodes(trees.nodes()), tokens(trees.nodes());
      std::vector<uint64_t> seeds(kRequests);
      for (size_t i = 0; i < seeds.size(); ++i) seeds[i] = 1000 + i * 77;
      host->accept({kRequests, kWidth, trees.tokens, trees.parents, trees.lens},
                   TargetProbabilities{vocabulary, vocabulary, p, draft, seeds},
                   {.counts = counts, .nodes = nodes, .tokens = tokens});
      EXPECT_EQ(found.counts, counts) << vocabulary;
      EXPECT_EQ(found.nodes, nodes) << vocabulary;
      EXPECT_EQ(found.tokens, tokens) << vocabulary;
    }
  }
}

}  // namespace
}  // namespace fovea
