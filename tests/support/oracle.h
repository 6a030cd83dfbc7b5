// SPDX-License-Identifier: Apache-2.0
// Computes the expected result of attention from contiguous data: no pages, no batch, and no code
// shared with the kernels.
#pragma once

#include <vector>

#include "support/attention_case.h"

namespace fovea::test {

// The results of one request.
struct Expected {
  std::vector<double> out;  // [q_len, q_heads, out_width]
  std::vector<double> lse;  // [q_len, q_heads] natural log, without the sink
};

struct OracleResult {
  Expected exact;  // fp64 over the values that the cache holds
  // The same in fp32, rounded where the kernel rounds. Its distance from `exact` is the measure of
  // error_budget.h.
  Expected plain;
  // The device under test rounds keys and values to the queries' dtype once more. `plain` does the
  // same, and the budget is slightly larger.
  bool rounded_keys = false;
};

// Returns true if key n of `request` is visible to new token `token`, by the definitions of
// attention_spec.h and batch.h.
std::vector<bool> visible_keys(const AttentionSpec& spec, const RequestData& request,
                               int32_t token);

OracleResult oracle(const AttentionCase& test, const CaseData& data, size_t request);

}  // namespace fovea::test
