// SPDX-License-Identifier: Apache-2.0
// The experts that the router of a mixture selects, and their weights.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "fovea/error.h"
#include "kernels/layer_ops.h"
#include "support/expect_close.h"

namespace fovea::kernels {
namespace {

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

void expect_close(float actual, double expected, const char* what, size_t index) {
  EXPECT_TRUE(test::is_near(actual, expected, 2e-6 * (1 + std::fabs(expected))))
      << what << " at " << index;
}

struct Routed {
  std::vector<int32_t> ids;
  std::vector<float> weights;
};

Routed route(MoeRoutingParams params, const std::vector<float>& logits) {
  ThreadPool threads(2);
  params.logits = logits.data();
  params.rows = static_cast<int64_t>(logits.size()) / params.experts;
  Routed routed;
  routed.ids.resize(static_cast<size_t>(params.rows * params.top_k));
  routed.weights.resize(routed.ids.size());
  params.ids = routed.ids.data();
  params.weights = routed.weights.data();
  moe_routing(params, threads);
  return routed;
}

TEST(MoeRouting, Softmax) {
  MoeRoutingParams params;
  params.experts = 4;
  params.top_k = 2;
  const std::vector<float> logits = {1, 3, 2, 0, /**/ 5, 5, 5, 5};
  const double sum = std::exp(1) + std::exp(3) + std::exp(2) + 1;
  Routed routed = route(params, logits);
  EXPECT_EQ(routed.ids, (std::vector<int32_t>{1, 2, 0, 1}));
  expect_close(routed.weights[0], std::exp(3) / sum, "softmax", 0);
  expect_close(routed.weights[1], std::exp(2) / sum, "softmax", 1);
  params.normalise = true;
  routed = route(params, logits);
  expect_close(routed.weights[0], sigmoid(1), "normalised", 0);
  expect_close(routed.weights[2], 0.5, "normalised", 2);
  params.score = MoeScore::topk_softmax;
  params.normalise = false;
  routed = route(params, logits);
  EXPECT_EQ(routed.ids, (std::vector<int32_t>{1, 2, 0, 1}));
  expect_close(routed.weights[0], sigmoid(1), "topk_softmax", 0);
  expect_close(routed.weights[1], sigmoid(-1), "topk_softmax", 1);
}

TEST(MoeRouting, RanksGetThePlacesOfTheirOwnExperts) {
  MoeRoutingParams params;
  params.experts = 4;
  params.top_k = 3;
  const std::vector<float> logits = {1, 3, 2, 0};
  const Routed whole = route(params, logits);
  params.first_own = 1;
  params.own = 1;
  const Routed routed = route(params, logits);
  EXPECT_EQ(routed.ids, (std::vector<int32_t>{0, -1, -1}));
  EXPECT_EQ(routed.weights, whole.weights);
  params.own = 3;
  EXPECT_EQ(route(params, logits).ids, (std::vector<int32_t>{0, 1, -1}));
}

TEST(MoeRouting, SigmoidTopOne) {
  MoeRoutingParams params;
  params.score = MoeScore::sigmoid;
  params.experts = 3;
  params.top_k = 1;
  const Routed routed = route(params, {-4, -2, -3});
  EXPECT_EQ(routed.ids[0], 1);
  expect_close(routed.weights[0], sigmoid(-2), "sigmoid", 0);
}

TEST(MoeRouting, GroupsChooseWithBiasAndWeighWithout) {
  MoeRoutingParams params;
  params.score = MoeScore::grouped_sigmoid;
  params.experts = 6;
  params.top_k = 2;
  params.groups = 3;
  params.top_groups = 1;
  params.normalise = true;
  params.factor = 2.5f;
  // Group 0 has the best single expert, group 1 the best pair; the bias raises group 2.
  const std::vector<float> logits = {4, -4, 2, 2, 0, -1};
  const std::vector<float> none(6, 0), lift = {0, 0, 0, 0, 1, 1};
  params.bias = none.data();
  Routed routed = route(params, logits);
  EXPECT_EQ(routed.ids, (std::vector<int32_t>{2, 3}));
  expect_close(routed.weights[0], 1.25, "grouped", 0);
  params.bias = lift.data();
  routed = route(params, logits);
  EXPECT_EQ(routed.ids, (std::vector<int32_t>{4, 5}));
  const double sum = sigmoid(0) + sigmoid(-1);
  expect_close(routed.weights[0], 2.5 * sigmoid(0) / sum, "grouped", 0);
  expect_close(routed.weights[1], 2.5 * sigmoid(-1) / sum, "grouped", 1);
  params.top_k = 3;
  EXPECT_THROW(route(params, logits), Error);
}

TEST(MoeRouting, TheSumOfSmallScoresCountsWithItsEpsilon) {
  MoeRoutingParams params;
  params.score = MoeScore::grouped_sigmoid;
  params.experts = 3;
  params.top_k = 2;
  params.normalise = true;
  params.sum_epsilon = 1e-6f;
  const Routed routed = route(params, {-14, -20, -13});
  EXPECT_EQ(routed.ids, (std::vector<int32_t>{2, 0}));
  const double sum = sigmoid(-13) + sigmoid(-14) + 1e-6;
  expect_close(routed.weights[0], sigmoid(-13) / sum, "small", 0);
  expect_close(routed.weights[1], sigmoid(-14) / sum, "small", 1);
}

TEST(MoeRouting, SoftmaxInsideTheGroupsOfTheBestExperts) {
  MoeRoutingParams params;
  params.score = MoeScore::grouped_softmax;
  params.experts = 6;
  params.top_k = 2;
  params.groups = 3;
  params.top_groups = 1;
  params.factor = 2.5f;
  // Group 0 has the best single expert, group 1 the best pair.
  const std::vector<float> logits = {4, -4, 2, 2, 0, -1};
  double sum = 0;
  for (const float logit : logits) sum += std::exp(logit);
  Routed routed = route(params, logits);
  EXPECT_EQ(routed.ids, (std::vector<int32_t>{0, 1}));
  expect_close(routed.weights[0], 2.5 * std::exp(4) / sum, "grouped", 0);
  expect_close(routed.weights[1], 2.5 * std::exp(-4) / sum, "grouped", 1);
  params.top_groups = 2;
  routed = route(params, logits);
  EXPECT_EQ(routed.ids, (std::vector<int32_t>{0, 2}));
  params.top_k = 5;
  EXPECT_THROW(route(params, logits), Error);
}

TEST(MoeRouting, NanLogitsStillNameExperts) {
  MoeRoutingParams params;
  params.experts = 4;
  params.top_k = 2;
  params.score = MoeScore::topk_softmax;
  const Routed routed = route(params, {NAN, 1, NAN, 2});
  EXPECT_EQ(routed.ids, (std::vector<int32_t>{3, 1}));
}

}  // namespace
}  // namespace fovea::kernels
