// SPDX-License-Identifier: Apache-2.0
// How wrong a kernel may be: the one table of tolerances.
//
// The rule: a row may be off by twice what a plain computation that rounds like the kernel is off
// by (fp32 arithmetic, result rounded to the output's dtype), plus a few units of that dtype. Both
// errors are measured against fp64 on the values the cache holds, relative to the row's largest
// value; the plain one is the worst of the request. Over a request the direction of the result may
// not turn by more than `cosine_distance`. LSE is always fp32 and has its own, tighter line.
#pragma once

#include "fovea/dtype.h"

namespace fovea::test {

struct ErrorBudget {
  double times_plain;      // of the plain computation's error
  double unit;             // half an ulp at 1
  double units;            // allowed on top
  double cosine_distance;  // 1 - cos(got, want); 0: not measured
};

inline constexpr ErrorBudget kF32Budget = {2, 0x1p-24, 16, 1e-11};
inline constexpr ErrorBudget kF16Budget = {2, 0x1p-11, 1, 1e-6};
inline constexpr ErrorBudget kBf16Budget = {2, 0x1p-8, 1, 5e-6};
// Products of fp8: the plain computation rounds weights to e4m3 as well. Tensor cores add the
// products of 32 keys in some 14 bits.
inline constexpr ErrorBudget kE4m3Budget = {2, 0x1p-8, 2, 1e-3};
inline constexpr ErrorBudget kE4m3LseBudget = {2, 0x1p-13, 8, 0};
// Of the natural log-sum-exp, relative to the larger of 1 and its value.
inline constexpr ErrorBudget kLseBudget = {2, 0x1p-24, 8, 0};
// A score is head_dim / 16 sums: on a GPU a tensor core cuts off what lies below the last bit of
// each, on a CPU they are those of a vector's lane. The LSE may be off by a unit for each, if those
// are more than the units above. Measured: 16 of MLA's 36.
inline constexpr int kColumnsOfASum = 16;

// With MLA's weights queries or keys pass through the dtype once more on a GPU, and so do values or
// results; 656-byte rows are multiplied by their scales into it. The plain computation rounds keys
// and values, and these are added. Measured: a quarter of a bf16 unit in the LSE of a single key
// (656-byte rows: 1.2 units), 1.1e-5 of cosine distance.
inline constexpr double kRoundedKeysLseUnits = 2;  // of the dtype
inline constexpr double kRoundedKeysCosine = 2e-5;

// Operations of a model's layers on a GPU against those of the CPU on the same bf16 inputs,
// relative to a row's largest value: f32 results (sums over up to 1024 products in another order)
// and bf16 ones.
inline constexpr ErrorBudget kLayerOpF32Budget = {1, 0x1p-24, 64, 0};
inline constexpr ErrorBudget kLayerOpBf16Budget = {1, 0x1p-8, 1, 0};
// Two products with an activation between them, each intermediate row rounded to bf16.
inline constexpr ErrorBudget kExpertsBudget = {1, 0x1p-8, 4, 0};

// Capped scores of bf16 are weighed without a base on a GPU: even the largest weight of a row is
// rounded, where otherwise it is 1. A row of a single key shows it.
inline constexpr double kRoundedWeightUnits = 1;  // of the dtype

// How far a logit of a model that runs in bf16 may be from eager fp32, for models of testdata's
// size (their logits span about 20; measured 0.006 to 0.043).
inline constexpr float kBf16ModelLogits = 0.1f;
// The same where a token's last expert leads the next one by less than bf16 can tell, so that
// another is taken. A token of deepseek_v3's prompt of 150 tokens leads by 6e-5; exchanging the two
// in fp32 on the CPU moves the logits by 0.33.
inline constexpr float kOtherExpertLogits = 0.5f;

// What storing keys and values as scaled e4m3 may cost: root mean square of the difference from
// attention over the unquantised ones, relative to that of the result.
inline constexpr double kE4m3RelativeRms = 5e-2;

// By the dtype of q.
constexpr const ErrorBudget& error_budget(DType q) {
  if (q == DType::f16) return kF16Budget;
  if (q == DType::bf16) return kBf16Budget;
  if (q == DType::f8e4m3) return kE4m3Budget;
  return kF32Budget;
}

}  // namespace fovea::test
