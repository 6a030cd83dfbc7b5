// SPDX-License-Identifier: Apache-2.0
#include "support/expect_close.h"

#include <algorithm>
#include <cmath>

#include "support/error_budget.h"

namespace fovea::test {
namespace {

using ::testing::AssertionFailure;
using ::testing::AssertionResult;
using ::testing::AssertionSuccess;

double largest(std::span<const double> row) {
  double largest = 0;
  for (double x : row) largest = std::max(largest, std::fabs(x));
  return largest;
}

// The plain computation's worst error over all rows, relative to each row's largest value.
double plain_error(const Expected& exact, const Expected& plain, size_t width) {
  double worst = 0;
  for (size_t row = 0; row < exact.out.size(); row += width) {
    const double magnitude = largest({&exact.out[row], width});
    if (magnitude == 0) continue;
    for (size_t d = row; d < row + width; ++d) {
      worst = std::max(worst, std::fabs(plain.out[d] - exact.out[d]) / magnitude);
    }
  }
  return worst;
}

AssertionResult out_is_close(const AttentionSpec& spec, const OracleResult& want,
                             std::span<const float> out) {
  const auto width = static_cast<size_t>(out_width(spec));
  const ErrorBudget& budget = error_budget(spec.q_dtype);
  const bool rounded_weights = spec.logit_cap > 0 && spec.q_dtype == DType::bf16;
  const double units = budget.units + (rounded_weights ? kRoundedWeightUnits : 0);
  const double relative =
      budget.times_plain * plain_error(want.exact, want.plain, width) + units * budget.unit;
  const std::vector<double>& exact = want.exact.out;
  double worst = -1, allowed_there = 0;
  size_t worst_at = 0;
  double product = 0, got_squares = 0, want_squares = 0;
  for (size_t row = 0; row < exact.size(); row += width) {
    const double allowed = relative * largest({&exact[row], width});
    for (size_t i = row; i < row + width; ++i) {
      const double error = std::fabs(static_cast<double>(out[i]) - exact[i]);
      const double excess = std::isnan(error) ? INFINITY : error - allowed;
      if (excess > worst || i == 0) {
        worst = excess;
        worst_at = i;
        allowed_there = allowed;
      }
      product += out[i] * exact[i];
      got_squares += static_cast<double>(out[i]) * out[i];
      want_squares += exact[i] * exact[i];
    }
  }
  const double norm = std::sqrt(got_squares) * std::sqrt(want_squares);
  const double cosine_distance = norm > 0 ? 1 - product / norm : 0;
  const double most_distance = want.rounded_keys ? kRoundedKeysCosine : budget.cosine_distance;
  if (exact.empty() || (worst <= 0 && cosine_distance <= most_distance)) {
    return AssertionSuccess();
  }
  const size_t row = worst_at / width;
  return AssertionFailure() << "worst at token " << row / spec.q_heads << ", head "
                            << row % spec.q_heads << ", dim " << worst_at % width << ": got "
                            << out[worst_at] << ", want " << exact[worst_at] << ", allowed error "
                            << allowed_there << "; cosine distance " << cosine_distance
                            << ", allowed " << most_distance;
}

AssertionResult lse_is_close(const AttentionSpec& spec, const OracleResult& want,
                             std::span<const float> lse) {
  double plain = 0;
  for (size_t i = 0; i < want.exact.lse.size(); ++i) {
    const double exact = want.exact.lse[i];
    if (!std::isfinite(exact)) continue;
    plain = std::max(plain, std::fabs(want.plain.lse[i] - exact) / std::max(1.0, std::fabs(exact)));
  }
  const ErrorBudget& budget = is_fp8(spec.q_dtype) ? kE4m3LseBudget : kLseBudget;
  const double sums = 1.0 * spec.head_dim / kColumnsOfASum;
  double relative = budget.times_plain * plain + std::max(budget.units, sums) * budget.unit;
  if (want.rounded_keys) relative += kRoundedKeysLseUnits * error_budget(spec.q_dtype).unit;
  for (size_t i = 0; i < want.exact.lse.size(); ++i) {
    const double exact = want.exact.lse[i];
    const double got = lse[i];
    const double allowed = relative * std::max(1.0, std::fabs(exact));
    if (got == exact || std::fabs(got - exact) <= allowed) continue;
    return AssertionFailure() << "lse of token " << i / spec.q_heads << ", head "
                              << i % spec.q_heads << ": got " << got << ", want " << exact
                              << ", allowed error " << allowed;
  }
  return AssertionSuccess();
}

}  // namespace

AssertionResult is_close(const AttentionSpec& spec, const OracleResult& want,
                         std::span<const float> out, std::span<const float> lse) {
  if (out.size() != want.exact.out.size()) {
    return AssertionFailure() << out.size() << " values, want " << want.exact.out.size();
  }
  AssertionResult result = out_is_close(spec, want, out);
  if (result && !lse.empty()) result = lse_is_close(spec, want, lse);
  return result;
}

}  // namespace fovea::test
