// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "core/check.h"
#include "kernels/cpu/parallel.h"
#include "kernels/layer_ops.h"

namespace fovea::kernels {
namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();

using Scores = std::array<float, kMaxExperts>;

// Takes the `top_k` largest of scores[0, count), in descending order. Among equal scores the lower
// index comes first. NaN ranks below everything.
void take_best(const float* scores, int32_t count, int32_t top_k, int32_t* ids) {
  std::array<bool, kMaxExperts> taken{};
  for (int32_t k = 0; k < top_k; ++k) {
    int32_t best = -1;
    for (int32_t i = 0; i < count; ++i) {
      if (taken[static_cast<size_t>(i)]) continue;
      if (best < 0 || scores[i] > scores[best] || std::isnan(scores[best])) best = i;
    }
    taken[static_cast<size_t>(best)] = true;
    ids[k] = best;
  }
}

void softmax(float* x, int32_t count) {
  const float max = *std::max_element(x, x + count);
  float sum = 0;
  for (int32_t i = 0; i < count; ++i) sum += x[i] = std::exp(x[i] - max);
  for (int32_t i = 0; i < count; ++i) x[i] /= sum;
}

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

bool is_grouped(MoeScore score) {
  return score == MoeScore::grouped_sigmoid || score == MoeScore::grouped_softmax;
}

bool is_softmax(MoeScore score) {
  return score == MoeScore::softmax || score == MoeScore::grouped_softmax;
}

// Excludes all experts but those of the best groups. A group ranks by its best score or, with
// sigmoid scores, by the sum of its two best scores.
void keep_best_groups(const MoeRoutingParams& params, float* choice) {
  if (params.top_groups >= params.groups) return;
  const int32_t size = params.experts / params.groups;
  Scores ranks;
  for (int32_t group = 0; group < params.groups; ++group) {
    float first = kNever, second = kNever;
    for (int32_t i = group * size; i < (group + 1) * size; ++i) {
      if (choice[i] > first) {
        second = first;
        first = choice[i];
      } else if (choice[i] > second) {
        second = choice[i];
      }
    }
    const bool counts_two = params.score == MoeScore::grouped_sigmoid && size > 1;
    ranks[static_cast<size_t>(group)] = counts_two ? first + second : first;
  }
  std::array<int32_t, kMaxExperts> best;
  take_best(ranks.data(), params.groups, params.top_groups, best.data());
  std::array<bool, kMaxExperts> kept{};
  for (int32_t k = 0; k < params.top_groups; ++k) {
    kept[static_cast<size_t>(best[static_cast<size_t>(k)])] = true;
  }
  for (int32_t i = 0; i < params.experts; ++i) {
    if (!kept[static_cast<size_t>(i / size)]) choice[i] = kNever;
  }
}

// Computes the scores of one row: `choice` selects the experts, `weight` scales their outputs.
void score_row(const MoeRoutingParams& params, const float* logits, float* choice, float* weight) {
  std::copy(logits, logits + params.experts, choice);
  if (is_softmax(params.score)) softmax(choice, params.experts);
  std::copy(choice, choice + params.experts, weight);
  if (params.score == MoeScore::sigmoid || params.score == MoeScore::grouped_sigmoid) {
    for (int32_t i = 0; i < params.experts; ++i) weight[i] = sigmoid(weight[i]);
  }
  if (params.score == MoeScore::grouped_sigmoid) {
    for (int32_t i = 0; i < params.experts; ++i) {
      choice[i] = weight[i] + (params.bias ? params.bias[i] : 0.0f);
    }
  }
  if (is_grouped(params.score)) keep_best_groups(params, choice);
}

void route_row(const MoeRoutingParams& params, int64_t row) {
  Scores choice, weight;
  score_row(params, params.logits + row * params.experts, choice.data(), weight.data());
  int32_t* ids = params.ids + row * params.top_k;
  float* out = params.weights + row * params.top_k;
  take_best(choice.data(), params.experts, params.top_k, ids);
  float sum = 0;
  for (int32_t k = 0; k < params.top_k; ++k) sum += out[k] = weight[static_cast<size_t>(ids[k])];
  if (params.score == MoeScore::topk_softmax) softmax(out, params.top_k);
  const bool divides = is_softmax(params.score) || is_grouped(params.score);
  if (params.normalise && divides) {
    for (int32_t k = 0; k < params.top_k; ++k) out[k] /= sum + params.sum_epsilon;
  }
  for (int32_t k = 0; k < params.top_k; ++k) {
    out[k] *= params.factor;
    const int32_t place = ids[k] - params.first_own;
    ids[k] = place >= 0 && place < params.own ? place : -1;
  }
}

}  // namespace

void moe_routing(const MoeRoutingParams& params, ThreadPool& threads) {
  check_argument(params.experts >= 1 && params.experts <= kMaxExperts,
                 "experts is {}, must be in [1, {}]", params.experts, kMaxExperts);
  check_argument(params.top_k >= 1 && params.top_k <= params.experts,
                 "top_k is {}, must be in [1, {}]", params.top_k, params.experts);
  check_argument(params.groups >= 1 && params.experts % params.groups == 0,
                 "groups is {}, must divide experts ({})", params.groups, params.experts);
  check_argument(params.top_groups >= 1 && params.top_groups <= params.groups,
                 "top_groups is {}, must be in [1, {}]", params.top_groups, params.groups);
  if (is_grouped(params.score)) {
    const int32_t reachable = params.experts / params.groups * params.top_groups;
    check_argument(params.top_k <= reachable,
                   "top_k is {}, must be at most the {} experts of {} groups", params.top_k,
                   reachable, params.top_groups);
  }
  const int64_t grain = std::max<int64_t>(1, 4096 / (params.experts * params.top_k));
  cpu::parallel_ranges(threads, params.rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) route_row(params, row);
  });
}

}  // namespace fovea::kernels
