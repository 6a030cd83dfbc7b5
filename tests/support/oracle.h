// SPDX-License-Identifier: Apache-2.0
// What attention must return, from contiguous data: no pages, no batch, and no code shared with the
// kernels.
#pragma once

#include <vector>

#include "support/attention_case.h"

namespace fovea::test {

// Of one request.
struct Expected {
  std::vector<double> out;  // [q_len, q_heads, out_width]
  std::vector<double> lse;  // [q_len, q_heads] natural log, without the sink
};

struct OracleResult {
  Expected exact;  // fp64 over the values that the cache holds
  // The same in fp32, plainly, rounded where the kernel rounds: its distance from `exact` is the
  // yardstick of error_budget.h.
  Expected plain;
  // Keys and values pass through the queries' dtype once more on the device under test: `plain`
  // does that too, and a little is added to the budget.
  bool rounded_keys = false;
};

// key n of `request` is visible to new token `token`, by the definitions of attention_spec.h and
// batch.h.
std::vector<bool> visible_keys(const AttentionSpec& spec, const RequestData& request,
                               int32_t token);

OracleResult oracle(const AttentionCase& test, const CaseData& data, size_t request);

}  // namespace fovea::test
