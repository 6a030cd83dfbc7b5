// SPDX-License-Identifier: Apache-2.0
// The attention problems that every backend is tested with.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "support/attention_case.h"

namespace fovea::test {

// Returns FOVEA_TEST_SCALE, at least 1: the randomised part of the list runs that many times. From
// 2 on it includes the largest shapes.
int test_scale();

// Returns the whole list. Names are unique and consist of [a-z0-9_]. At scale 1 the oracle computes
// all cases in a few seconds.
std::vector<AttentionCase> attention_cases();

// Returns a case of the list. Throws std::out_of_range for an unknown name.
AttentionCase attention_case(std::string_view name);

// Return bases for new cases: fp32, dense pages of 16, one small ragged batch. On a GPU, bf16
// replaces fp32, here and in the whole list.
AttentionCase mha_case(std::string name, int32_t q_heads, int32_t kv_heads, int32_t head_dim);
AttentionCase mla_case(std::string name, int32_t q_heads);
// Returns the first with a batch of decode, extend, prefill and empty requests.
AttentionCase mixed_case(std::string name, int32_t q_heads, int32_t kv_heads, int32_t head_dim);

// The scales of a cache and their names in cases.
inline constexpr KvScale kScales[] = {KvScale::none, KvScale::per_tensor, KvScale::per_head,
                                      KvScale::per_token_head};
const char* scale_name(KvScale scale);

}  // namespace fovea::test
