// SPDX-License-Identifier: Apache-2.0
// The attention problems that every backend is held against.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "support/attention_case.h"

namespace fovea::test {

// FOVEA_TEST_SCALE, at least 1: how many times over the randomised part of the list runs, and
// whether its largest shapes are in it (from 2 on).
int test_scale();

// The whole list; names are unique and made of [a-z0-9_]. At scale 1 it is bounded: the oracle
// computes all of it in a few seconds.
std::vector<AttentionCase> attention_cases();

// One case of the list above. Throws std::out_of_range when there is none of that name.
AttentionCase attention_case(std::string_view name);

// Starting points for cases of one's own: fp32, dense pages of 16, one small ragged batch. On a GPU
// bf16 takes fp32's place, here and in the whole list.
AttentionCase mha_case(std::string name, int32_t q_heads, int32_t kv_heads, int32_t head_dim);
AttentionCase mla_case(std::string name, int32_t q_heads);
// The first with a batch of decode, extend and prefill rows side by side, and all that is empty.
AttentionCase mixed_case(std::string name, int32_t q_heads, int32_t kv_heads, int32_t head_dim);

// The kinds of scales of a cache, and what cases of them are called.
inline constexpr KvScale kScales[] = {KvScale::none, KvScale::per_tensor, KvScale::per_head,
                                      KvScale::per_token_head};
const char* scale_name(KvScale scale);

}  // namespace fovea::test
