// SPDX-License-Identifier: Apache-2.0
#include "engine/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "core/check.h"
#include "kernels/philox.h"

namespace fovea {
namespace {

// Returns the smallest id with the largest logit.
int32_t find_largest(std::span<const float> logits) {
  int32_t best = -1;
  float largest = -std::numeric_limits<float>::infinity();
  for (size_t i = 0; i < logits.size(); ++i) {
    const float value = logits[i];
    if (value > largest) {
      largest = value;
      best = static_cast<int32_t>(i);
    } else if (std::isnan(value)) {
      fail(ErrorCode::invalid_argument, "the logit of token {} is NaN", i);
    }
  }
  check_argument(best >= 0, "the logits of all {} tokens are -inf", logits.size());
  check_argument(std::isfinite(largest), "the logit of token {} is +inf", best);
  return best;
}

// Returns ln of the softmax denominator.
double log_sum_exp(std::span<const float> logits, float largest) {
  double sum = 0;
  for (const float value : logits) sum += std::exp(static_cast<double>(value) - largest);
  return largest + std::log(sum);
}

}  // namespace

Sampler::Sampler(int32_t vocabulary) : changes_(vocabulary) {
  candidates_.reserve(static_cast<size_t>(vocabulary));
  order_.reserve(static_cast<size_t>(vocabulary));
}

SampledToken Sampler::sample(std::span<const float> logits, const SamplingParams& params,
                             uint64_t position) {
  const int32_t token = choose(logits, params, position);
  return params.logprobs >= 0 ? score(logits, token, params.logprobs) : SampledToken{token};
}

SampledToken Sampler::sample(std::span<const float> logits, const SamplingParams& params,
                             const TokenHistory& history) {
  const uint64_t position = history.prompt.size() + history.output.size();
  if (history.allowed.empty() &&
      !changes_logits(params, static_cast<int32_t>(history.output.size()))) {
    return sample(logits, params, position);
  }
  const int32_t token = choose(changes_.apply(logits, params, history), params, position);
  return params.logprobs >= 0 ? score(logits, token, params.logprobs) : SampledToken{token};
}

int32_t Sampler::sample_allowed(std::span<const float> logits, const SamplingParams& params,
                                uint64_t position, std::span<const uint64_t> allowed) {
  return choose(allowed.empty() ? logits : changes_.mask(logits, allowed), params, position);
}

SampledToken Sampler::score(std::span<const float> logits, int32_t token, int32_t count) {
  const double normaliser = log_sum_exp(logits, logits[static_cast<size_t>(find_largest(logits))]);
  return {token, static_cast<float>(logits[static_cast<size_t>(token)] - normaliser),
          likeliest(logits, normaliser, count)};
}

int32_t Sampler::choose(std::span<const float> logits, const SamplingParams& params,
                        uint64_t position) {
  const int32_t best = find_largest(logits);
  if (params.temperature == 0) return best;
  return draw(logits, logits[static_cast<size_t>(best)], params, position);
}

float Sampler::logprob(std::span<const float> logits, int32_t token) {
  const float largest = logits[static_cast<size_t>(find_largest(logits))];
  return static_cast<float>(logits[static_cast<size_t>(token)] - log_sum_exp(logits, largest));
}

int32_t Sampler::draw(std::span<const float> logits, float largest, const SamplingParams& params,
                      uint64_t position) {
  candidates_.clear();
  const double inverse = 1.0 / static_cast<double>(params.temperature);
  for (size_t i = 0; i < logits.size(); ++i) {
    const double weight = std::exp((static_cast<double>(logits[i]) - largest) * inverse);
    if (weight > 0 && weight >= static_cast<double>(params.min_p))
      candidates_.push_back({weight, static_cast<int32_t>(i)});
  }
  const auto top_k = static_cast<size_t>(params.top_k);
  if (top_k > 0 && top_k < candidates_.size()) {
    std::nth_element(candidates_.begin(), candidates_.begin() + static_cast<int64_t>(top_k),
                     candidates_.end(), ranks_before);
    candidates_.resize(top_k);
    // Sorts, so that the order of summation does not depend on nth_element.
    std::sort(candidates_.begin(), candidates_.end(), ranks_before);
  }
  if (params.top_p < 1) candidates_.resize(nucleus(static_cast<double>(params.top_p)));

  double total = 0;
  for (const Candidate& candidate : candidates_) total += candidate.weight;
  double rest = kernels::uniform_at(params.seed, position) * total;
  for (const Candidate& candidate : candidates_) {
    rest -= candidate.weight;
    if (rest < 0) return candidate.token;
  }
  return candidates_.back().token;  // reached if the sum was rounded down
}

size_t Sampler::nucleus(double share) {
  double wanted = 0;
  for (const Candidate& candidate : candidates_) wanted += candidate.weight;
  wanted *= share;
  // A nucleus is small, so it sorts a growing prefix instead of the whole vocabulary.
  size_t sorted = 0;
  double sum = 0;
  for (size_t front = 256; sorted < candidates_.size(); front *= 4) {
    const size_t end = std::min(front, candidates_.size());
    const auto first = candidates_.begin() + static_cast<int64_t>(sorted);
    const auto last = candidates_.begin() + static_cast<int64_t>(end);
    if (last != candidates_.end()) std::nth_element(first, last, candidates_.end(), ranks_before);
    std::sort(first, last, ranks_before);
    for (; sorted < end; ++sorted) {
      sum += candidates_[sorted].weight;
      if (sum >= wanted) return sorted + 1;
    }
  }
  return candidates_.size();
}

std::vector<TokenLogprob> Sampler::likeliest(std::span<const float> logits, double normaliser,
                                             int32_t count) {
  if (count == 0) return {};
  order_.resize(logits.size());
  std::iota(order_.begin(), order_.end(), 0);
  const auto end = order_.begin() + std::min<int64_t>(count, static_cast<int64_t>(order_.size()));
  std::partial_sort(order_.begin(), end, order_.end(), [&](int32_t a, int32_t b) {
    const float left = logits[static_cast<size_t>(a)], right = logits[static_cast<size_t>(b)];
    return left != right ? left > right : a < b;
  });
  std::vector<TokenLogprob> top;
  for (auto token = order_.begin(); token != end; ++token)
    top.push_back({*token, static_cast<float>(logits[static_cast<size_t>(*token)] - normaliser)});
  return top;
}

}  // namespace fovea
