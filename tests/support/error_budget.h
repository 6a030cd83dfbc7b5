// SPDX-License-Identifier: Apache-2.0
// The table of tolerances.
//
// The rule: the error of a row may be twice that of a plain computation which rounds like the
// kernel (fp32 arithmetic, result rounded to the output's dtype), plus a few units of that dtype.
// Both errors are measured against fp64 on the cached values, relative to the row's largest value;
// the plain error is the maximum over the request. Over a request, the direction of the result may
// change by at most `cosine_distance`. LSE is always fp32 and has its own, tighter limit.
#pragma once

#include "fovea/dtype.h"

namespace fovea::test {

struct ErrorBudget {
  double times_plain;      // factor of the plain computation's error
  double unit;             // half an ulp at 1
  double units;            // allowed in addition
  double cosine_distance;  // 1 - cos(got, want); 0: not measured
};

inline constexpr ErrorBudget kF32Budget = {2, 0x1p-24, 16, 1e-11};
inline constexpr ErrorBudget kF16Budget = {2, 0x1p-11, 1, 1e-6};
inline constexpr ErrorBudget kBf16Budget = {2, 0x1p-8, 1, 5e-6};
// Products of fp8: the plain computation also rounds weights to e4m3. Tensor cores add the products
// of 32 keys with about 14 bits.
inline constexpr ErrorBudget kE4m3Budget = {2, 0x1p-8, 2, 1e-3};
inline constexpr ErrorBudget kE4m3LseBudget = {2, 0x1p-13, 8, 0};
// The error of the natural log-sum-exp, relative to max(1, its absolute value).
inline constexpr ErrorBudget kLseBudget = {2, 0x1p-24, 8, 0};
// A score is head_dim / 16 sums: on a GPU a tensor core truncates each below its last bit, on a CPU
// they are the sums of a vector's lanes. The error of the LSE may be one unit for each sum, if that
// is more than the units above.
inline constexpr int kColumnsOfASum = 16;

// With MLA's weights, a GPU rounds queries or keys, and values or results, to the dtype once more;
// so it rounds the scaled values of 656-byte rows. The plain computation rounds keys and values,
// and these limits are added.
inline constexpr double kRoundedKeysLseUnits = 2;  // units of the dtype
inline constexpr double kRoundedKeysCosine = 2e-5;

// Linear layers in f32. A row of KDA is read from a state in which larger values cancel. A decay
// has an error of one unit on a GPU, and the fixed one of lightning attention repeats it for as
// many tokens as the state remembers.
inline constexpr double kColumnDecayUnits = 96;
inline constexpr double kFixedDecayUnits = 128;

// Operations of model layers on a GPU, compared with the CPU on the same bf16 inputs, relative to a
// row's largest value: f32 results (sums over up to 1024 products in another order) and bf16
// results.
inline constexpr ErrorBudget kLayerOpF32Budget = {1, 0x1p-24, 64, 0};
inline constexpr ErrorBudget kLayerOpBf16Budget = {1, 0x1p-8, 1, 0};
// Two products with an activation between them, each intermediate row rounded to bf16.
inline constexpr ErrorBudget kExpertsBudget = {1, 0x1p-8, 4, 0};

// For capped scores a GPU rounds weights of bf16 that are not relative to the maximum, so even the
// largest weight of a row, which otherwise is 1, is rounded. It shows in rows of a single key.
inline constexpr double kRoundedWeightUnits = 1;  // units of the dtype

// The maximum difference between a logit of a model in bf16 and eager fp32, for models of
// testdata's size, whose logits span about 20.
inline constexpr float kBf16ModelLogits = 0.1f;
// The same if the scores of a token's last chosen expert and of the next one are equal in bf16, so
// that the GPU can choose the other. A prompt of deepseek_v3 has such a token.
inline constexpr float kOtherExpertLogits = 0.5f;

// The maximum error by storing keys and values as scaled e4m3: the root mean square of the
// difference from attention over unquantised values, relative to that of the result.
inline constexpr double kE4m3RelativeRms = 5e-2;

// Returns the tolerances for a dtype of q.
constexpr const ErrorBudget& error_budget(DType q) {
  if (q == DType::f16) return kF16Budget;
  if (q == DType::bf16) return kBf16Budget;
  if (q == DType::f8e4m3) return kE4m3Budget;
  return kF32Budget;
}

}  // namespace fovea::test
