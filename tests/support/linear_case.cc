// SPDX-License-Identifier: Apache-2.0
#include "support/linear_case.h"

#include <algorithm>
#include <random>
#include <utility>

namespace fovea::test {
namespace {

std::vector<float> normal(std::mt19937& random, size_t size, float deviation = 1) {
  std::normal_distribution<float> distribution(0, deviation);
  std::vector<float> values(size);
  for (float& value : values) value = distribution(random);
  return values;
}

std::vector<float> uniform(std::mt19937& random, size_t size, float low, float high) {
  std::uniform_real_distribution<float> distribution(low, high);
  std::vector<float> values(size);
  for (float& value : values) value = distribution(random);
  return values;
}

LinearCase linear_case(std::string name, AttentionKind kind, int32_t q_heads, int32_t kv_heads) {
  LinearCase test;
  test.name = std::move(name);
  test.spec.kind = kind;
  test.spec.linear.key_heads = q_heads;
  test.spec.linear.value_heads = kv_heads;
  test.spec.linear.key_dim = 32;
  test.spec.linear.value_dim = 16;
  test.spec.linear.conv_width = 4;
  test.lengths = {1, 2, 3, 5, 70, 130, 16};
  return test;
}

// Adds cases of Mamba1, whose channels share B and C in groups.
void add_mamba1(std::vector<LinearCase>& cases) {
  LinearCase test = linear_case("mamba1", AttentionKind::mamba1, 1, 44);
  test.spec.linear.key_dim = 16;
  test.spec.linear.value_dim = 1;
  cases.push_back(test);
  LinearCase other = test;
  other.name = "mamba1_groups";
  other.spec.linear.key_heads = 2;
  other.spec.linear.key_dim = 20;
  other.spec.linear.conv_width = 2;
  other.skip = other.conv_bias = false;
  cases.push_back(other);
  other.name = "mamba1_no_conv";
  other.spec.linear.conv_width = 0;
  other.spec.linear.key_dim = 128;
  other.skip = true;
  other.lengths = {1, 9, 2};
  cases.push_back(other);
  other = test;
  other.name = "mamba1_bf16_states";
  other.spec.q_dtype = DType::bf16;
  other.state_dtype = DType::bf16;
  cases.push_back(other);
  other.name = "mamba1_f16_states";
  other.state_dtype = DType::f16;
  other.spec.linear.key_dim = 8;
  cases.push_back(other);
  other = test;
  other.name = "mamba1_long";
  other.spec.linear.value_heads = 32;
  other.lengths = {257, 600, 1};
  cases.push_back(other);
}

// Adds cases of convolutions alone.
void add_short_conv(std::vector<LinearCase>& cases) {
  LinearCase test = linear_case("short_conv", AttentionKind::short_conv, 0, 36);
  test.spec.linear.key_dim = 0;
  test.spec.linear.value_dim = 1;
  test.spec.linear.conv_width = 3;
  test.plain_conv = true;
  cases.push_back(test);
  test.name = "short_conv_silu";
  test.plain_conv = test.conv_bias = false;
  test.spec.linear.value_heads = 5;
  test.spec.linear.value_dim = 40;
  test.spec.linear.conv_width = 7;
  cases.push_back(test);
  test.name = "short_conv_bf16";
  test.plain_conv = true;
  test.spec.q_dtype = DType::bf16;
  test.spec.linear.conv_width = 2;
  cases.push_back(test);
  // So many channels that threads take four each in a decode, too.
  test = linear_case("short_conv_wide", AttentionKind::short_conv, 0, 96);
  test.spec.linear.key_dim = 0;
  test.spec.linear.value_dim = 128;
  test.lengths = {1, 9, 2, 3, 40, 5, 6};
  cases.push_back(test);
}

// Adds cases of KDA, lightning attention, Mamba1 and convolutions alone.
void add_other_kinds(std::vector<LinearCase>& cases) {
  for (const auto& [name, kind] : {std::pair{std::string("kda"), AttentionKind::kda},
                                   {std::string("lightning"), AttentionKind::lightning}}) {
    LinearCase test = linear_case(name, kind, 2, 4);
    cases.push_back(test);
    test = linear_case(name + "_odd_dims", kind, 1, 3);
    test.spec.linear.key_dim = 24;
    test.spec.linear.value_dim = 20;
    test.spec.linear.conv_width = 0;
    test.l2_normalise = false;
    cases.push_back(test);
    test.name = name + "_f16_states";
    test.state_dtype = DType::f16;
    cases.push_back(test);
    test = linear_case(name + "_128", kind, 1, 2);
    test.spec.linear.key_dim = test.spec.linear.value_dim = 128;
    test.lengths = {1, 9, 2};
    cases.push_back(test);
    test.name = name + "_rounded_bf16_states";
    test.spec.q_dtype = DType::bf16;
    test.state_dtype = DType::bf16;
    test.lengths = {130, 64, 1, 63};
    cases.push_back(test);
  }
  // One tap, which leaves no window: a factor and SiLU, after which prompts go in chunks.
  LinearCase test = cases.back();
  test.name = "lightning_one_tap";
  test.spec.linear.conv_width = 1;
  cases.push_back(test);
  // Rows that only the smallest blocks of a decode divide.
  test = linear_case("lightning_24_rows", AttentionKind::lightning, 1, 2);
  test.spec.linear.key_dim = 128;
  test.spec.linear.value_dim = 24;
  test.spec.linear.conv_width = 0;
  test.lengths = {1, 9, 2};
  cases.push_back(test);
  test = linear_case("kda_rounded", AttentionKind::kda, 2, 2);
  test.spec.linear.key_dim = test.spec.linear.value_dim = 128;
  test.spec.q_dtype = DType::bf16;
  test.lengths = {130, 64, 1, 63};
  cases.push_back(test);
  add_mamba1(cases);
  add_short_conv(cases);
}

}  // namespace

std::vector<LinearCase> linear_cases() {
  std::vector<LinearCase> cases;
  LinearCase test = linear_case("delta", AttentionKind::gated_delta_net, 2, 4);
  cases.push_back(test);
  test.name = "delta_plain";
  test.conv_bias = test.l2_normalise = false;
  test.spec.linear.conv_width = 0;
  test.spec.linear.value_heads = 2;
  cases.push_back(test);
  test = linear_case("delta_odd_dims", AttentionKind::gated_delta_net, 1, 3);
  test.spec.linear.key_dim = 24;
  test.spec.linear.value_dim = 20;
  test.spec.linear.conv_width = 2;
  cases.push_back(test);
  test = linear_case("delta_128", AttentionKind::gated_delta_net, 1, 2);
  test.spec.linear.key_dim = test.spec.linear.value_dim = 128;
  test.lengths = {1, 9, 2};
  cases.push_back(test);

  // 64 tokens and more may be computed in chunks.
  test.name = "delta_rounded";
  test.spec.q_dtype = DType::bf16;
  test.lengths = {130, 64, 1, 63};
  cases.push_back(test);
  test.name = "delta_rounded_f16_states";
  test.state_dtype = DType::f16;
  cases.push_back(test);

  test = linear_case("mamba2", AttentionKind::mamba2, 1, 4);
  cases.push_back(test);
  test.name = "mamba2_groups";
  test.spec.linear.key_heads = 2;
  test.skip = test.conv_bias = false;
  test.spec.linear.value_dim = 64;
  cases.push_back(test);
  test.name = "mamba2_no_conv";
  test.spec.linear.conv_width = 0;
  cases.push_back(test);
  test = linear_case("mamba2_128", AttentionKind::mamba2, 1, 2);
  test.spec.linear.key_dim = 128;
  test.lengths = {1, 9, 2};
  cases.push_back(test);
  test.name = "mamba2_rounded";
  test.spec.q_dtype = DType::bf16;
  test.spec.linear.value_dim = 128;
  test.lengths = {130, 64, 1, 63};
  cases.push_back(test);
  test.name = "mamba2_rounded_bf16_states";
  test.state_dtype = DType::bf16;
  test.spec.linear.value_dim = 64;
  test.spec.linear.value_heads = 3;
  test.skip = false;
  cases.push_back(test);

  // States of 16 bits.
  test = linear_case("delta_bf16_states", AttentionKind::gated_delta_net, 1, 3);
  test.state_dtype = DType::bf16;
  cases.push_back(test);
  test.name = "delta_f16_states";
  test.state_dtype = DType::f16;
  test.spec.linear.key_dim = 24;
  test.spec.linear.value_dim = 20;
  cases.push_back(test);
  test = linear_case("mamba2_bf16_states", AttentionKind::mamba2, 1, 2);
  test.state_dtype = DType::bf16;
  cases.push_back(test);

  // Longer than the chunks of other kernels: 64 tokens of the delta rule, 256 of mamba2.
  for (const auto& [name, kind] : {std::pair{"delta_long", AttentionKind::gated_delta_net},
                                   {"mamba2_long", AttentionKind::mamba2},
                                   {"kda_long", AttentionKind::kda},
                                   {"lightning_long", AttentionKind::lightning}}) {
    test = linear_case(name, kind, 1, 2);
    test.lengths = {257, 600, 1};
    cases.push_back(test);
  }
  add_other_kinds(cases);
  return cases;
}

StateCacheSpec state_spec(const LinearCase& test) {
  StateCacheSpec state;
  state.layers = 2;
  state.conv_dim = conv_dim_of(test.spec);
  state.conv_width = std::max(1, test.spec.linear.conv_width);
  state.dtype = test.state_dtype;
  if (test.spec.kind == AttentionKind::short_conv) return state;
  state.heads = test.spec.linear.value_heads;
  state.rows = test.spec.linear.value_dim;
  state.columns = test.spec.linear.key_dim;
  return state;
}

LinearData make_data(const LinearCase& test) {
  std::mt19937 random(test.seed);
  LinearData data;
  const auto heads = static_cast<size_t>(test.spec.linear.value_heads);
  const auto dim = static_cast<size_t>(test.spec.linear.conv_dim());
  for (int32_t length : test.lengths) {
    LinearSequence sequence;
    const auto tokens = static_cast<size_t>(length);
    // Without normalised keys the delta rule diverges unless |k| is small.
    const bool small = has_delta_rule(test.spec.kind) && !test.l2_normalise;
    sequence.mixed = normal(random, tokens * dim, small ? 0.15f : 1.0f);
    const bool by_column = test.spec.kind == AttentionKind::kda;
    const size_t decays = by_column ? static_cast<size_t>(test.spec.linear.key_dim) : 1;
    sequence.log_decay = uniform(random, tokens * heads * decays, by_column ? -1.0f : -0.5f, 0.0f);
    sequence.beta = uniform(random, tokens * heads, 0.0f, 1.0f);
    data.sequences.push_back(std::move(sequence));
  }
  if (test.spec.kind == AttentionKind::mamba1) {
    data.a = uniform(random, heads * static_cast<size_t>(test.spec.linear.key_dim), -1.0f, 0.0f);
  }
  data.conv_weight = normal(random, dim * static_cast<size_t>(test.spec.linear.conv_width), 0.5f);
  data.conv_bias = normal(random, dim, 0.5f);
  data.skip = normal(random, heads);
  data.head_log_decay = uniform(random, heads, -0.5f, 0.0f);
  return data;
}

bool makes_two_calls(const LinearCase& test) {
  return test.spec.kind == AttentionKind::mamba1 && test.spec.linear.conv_width > 0;
}

LinearTensors convolution_of(const LinearCase& test, const LinearData& data,
                             const LinearSequence& sequence) {
  LinearTensors tensors;
  tensors.mixed = sequence.mixed.data();
  if (test.spec.linear.conv_width == 0) return tensors;
  tensors.conv_weight = data.conv_weight.data();
  if (test.conv_bias) tensors.conv_bias = data.conv_bias.data();
  tensors.plain_conv = test.plain_conv;
  return tensors;
}

LinearTensors tensors_of(const LinearCase& test, const LinearData& data,
                         const LinearSequence& sequence) {
  const AttentionKind kind = test.spec.kind;
  const bool fixed = kind == AttentionKind::lightning, is_mamba1 = kind == AttentionKind::mamba1;
  LinearTensors tensors = convolution_of(test, data, sequence);
  if (kind == AttentionKind::short_conv) return tensors;
  if (is_mamba1) tensors.conv_weight = tensors.conv_bias = nullptr;
  tensors.log_decay = fixed       ? data.head_log_decay.data()
                      : is_mamba1 ? data.a.data()
                                  : sequence.log_decay.data();
  if (!fixed) tensors.beta = sequence.beta.data();
  const bool has_skip = is_mamba1 || kind == AttentionKind::mamba2;
  if (has_skip && test.skip) tensors.skip = data.skip.data();
  tensors.l2_normalise_qk = has_delta_rule(kind) && test.l2_normalise;
  return tensors;
}

}  // namespace fovea::test
