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

double largest_finite(std::span<const double> row) {
  double largest = 0;
  for (double x : row) {
    if (std::isfinite(x)) largest = std::max(largest, std::fabs(x));
  }
  return largest;
}

// Raises `worst` to the plain computation's error. It is infinite if plain is not finite but exact
// is, so that the row fails.
void take_plain_error(double exact, double plain, double magnitude, double& worst) {
  if (!std::isfinite(exact) || magnitude == 0) return;
  const double error = std::fabs(plain - exact) / magnitude;
  worst = std::max(worst, std::isfinite(error) ? error : INFINITY);
}

// Returns the plain computation's largest error over all rows, relative to each row's largest
// value.
double plain_out_error(const OracleResult& want, size_t width) {
  const std::vector<double>& exact = want.exact.out;
  double worst = 0;
  for (size_t row = 0; row < exact.size(); row += width) {
    const double magnitude = largest_finite({&exact[row], width});
    for (size_t d = row; d < row + width; ++d) {
      take_plain_error(exact[d], want.plain.out[d], magnitude, worst);
    }
  }
  return worst;
}

double lse_magnitude(double exact) { return std::max(1.0, std::fabs(exact)); }

double plain_lse_error(const OracleResult& want) {
  const std::vector<double>& exact = want.exact.lse;
  double worst = 0;
  for (size_t i = 0; i < exact.size(); ++i) {
    take_plain_error(exact[i], want.plain.lse[i], lse_magnitude(exact[i]), worst);
  }
  return worst;
}

// Returns the distance of a value beyond `allowed`: 0 or less if it is near, infinite if there is
// no distance.
double excess_of(double got, double want, double allowed) {
  const double error = got == want ? 0 : std::fabs(got - want);
  if (is_near(got, want, allowed)) return std::isnan(error) ? -allowed : error - allowed;
  return std::isfinite(error) ? error - allowed : INFINITY;
}

double recurrence_units(AttentionKind kind) {
  if (kind == AttentionKind::kda || kind == AttentionKind::mamba1) return kColumnDecayUnits;
  return kind == AttentionKind::lightning ? kFixedDecayUnits : 0;
}

int32_t heads_of(const AttentionSpec& spec) {
  return is_linear(spec.kind) ? spec.linear.value_heads : spec.q_heads;
}

// Returns how many results are compared relative to the largest of them: those of a head, or of a
// token if its heads are single channels, whose terms may cancel.
size_t row_width(const AttentionSpec& spec) {
  const bool single = is_linear(spec.kind) && spec.linear.value_dim == 1;
  return static_cast<size_t>(single ? heads_of(spec) : out_width(spec));
}

AssertionResult out_is_close(const AttentionSpec& spec, const OracleResult& want,
                             std::span<const float> out) {
  const size_t width = row_width(spec);
  const ErrorBudget& budget = error_budget(spec.q_dtype);
  const bool rounded_weights = spec.scores.logit_cap > 0 && spec.q_dtype == DType::bf16;
  double units = budget.units + (rounded_weights ? kRoundedWeightUnits : 0);
  if (spec.q_dtype == DType::f32) units = std::max(units, recurrence_units(spec.kind));
  const double relative = budget.times_plain * plain_out_error(want, width) + units * budget.unit;
  if (!std::isfinite(relative)) {
    return AssertionFailure() << "the plain computation's out is not finite where exact is";
  }
  const std::vector<double>& exact = want.exact.out;
  double worst = -INFINITY, allowed_there = 0;
  size_t worst_at = 0;
  double product = 0, got_squares = 0, want_squares = 0;
  for (size_t row = 0; row < exact.size(); row += width) {
    const double allowed = relative * largest_finite({&exact[row], width});
    for (size_t i = row; i < row + width; ++i) {
      const double got = out[i];
      const double excess = excess_of(got, exact[i], allowed);
      if (excess > worst) {
        worst = excess;
        worst_at = i;
        allowed_there = allowed;
      }
      if (!std::isfinite(exact[i])) continue;
      product += got * exact[i];
      got_squares += got * got;
      want_squares += exact[i] * exact[i];
    }
  }
  const double norm = std::sqrt(got_squares) * std::sqrt(want_squares);
  const double cosine_distance = norm > 0 ? 1 - product / norm : 0;
  const double max_distance = want.rounded_keys ? kRoundedKeysCosine : budget.cosine_distance;
  if (exact.empty() || (worst <= 0 && cosine_distance <= max_distance)) {
    return AssertionSuccess();
  }
  const auto head_width = static_cast<size_t>(out_width(spec));
  const size_t row = worst_at / head_width;
  const auto heads = static_cast<size_t>(heads_of(spec));
  return AssertionFailure() << "worst at token " << row / heads << ", head " << row % heads
                            << ", dim " << worst_at % head_width << ": got " << out[worst_at]
                            << ", want " << exact[worst_at] << ", allowed error " << allowed_there
                            << "; cosine distance " << cosine_distance << ", allowed "
                            << max_distance;
}

AssertionResult lse_is_close(const AttentionSpec& spec, const OracleResult& want,
                             std::span<const float> lse) {
  const ErrorBudget& budget = is_fp8(spec.q_dtype) ? kE4m3LseBudget : kLseBudget;
  const double sums = 1.0 * cached_key_dim(spec) / kColumnsOfASum;
  double relative =
      budget.times_plain * plain_lse_error(want) + std::max(budget.units, sums) * budget.unit;
  if (want.rounded_keys) relative += kRoundedKeysLseUnits * error_budget(spec.q_dtype).unit;
  if (!std::isfinite(relative)) {
    return AssertionFailure() << "the plain computation's lse is not finite where exact is";
  }
  for (size_t i = 0; i < want.exact.lse.size(); ++i) {
    const double exact = want.exact.lse[i];
    const AssertionResult near = is_near(lse[i], exact, relative * lse_magnitude(exact));
    if (near) continue;
    return AssertionFailure() << "lse of token " << i / spec.q_heads << ", head "
                              << i % spec.q_heads << ": " << near.message();
  }
  return AssertionSuccess();
}

}  // namespace

AssertionResult is_near(double got, double want, double allowed) {
  if (got == want || (std::isnan(got) && std::isnan(want))) return AssertionSuccess();
  const bool finite = std::isfinite(got) && std::isfinite(want) && std::isfinite(allowed);
  if (finite && std::fabs(got - want) <= allowed) return AssertionSuccess();
  return AssertionFailure() << "got " << got << ", want " << want << ", allowed error " << allowed;
}

AssertionResult is_close(const AttentionSpec& spec, const OracleResult& want,
                         std::span<const float> out, std::span<const float> lse) {
  if (out.size() != want.exact.out.size()) {
    return AssertionFailure() << out.size() << " values, want " << want.exact.out.size();
  }
  if (!lse.empty() && lse.size() != want.exact.lse.size()) {
    return AssertionFailure() << lse.size() << " LSEs, want " << want.exact.lse.size();
  }
  AssertionResult result = out_is_close(spec, want, out);
  if (result && !lse.empty()) result = lse_is_close(spec, want, lse);
  return result;
}

}  // namespace fovea::test
