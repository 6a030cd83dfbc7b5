// SPDX-License-Identifier: Apache-2.0
// Linear layers through the C interface give the bits that C++ gives, and their slots keep drafts.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "c/small_world.h"
#include "c/through_c.h"
#include "support/linear_case.h"

namespace fovea::test {
namespace {

fovea_backend* linear_backend(const LinearCase& test, const BatchLimits& limits,
                              fovea_state_pool* states, fovea_thread_pool* threads) {
  const fovea_attention_spec spec = to_c(test.spec);
  const fovea_batch_limits c_limits = to_c(limits);
  fovea_selection_request request;
  check_status(fovea_selection_request_init(&request, sizeof request));
  request.spec = &spec;
  request.limits = &c_limits;
  fovea_selection* selection = nullptr;
  fovea_backend* backend = nullptr;
  check_status(fovea_selection_create(&request, &selection));
  check_status(fovea_backend_create(selection, nullptr, states, threads, &backend));
  check_status(fovea_selection_destroy(selection));
  check_status(fovea_backend_reserve(backend, &c_limits, nullptr, 0));
  return backend;
}

// Runs the first sequence of a case by C++.
std::vector<float> expected_linear(const LinearCase& test, const BatchView& batch,
                                   const LayerTensors& layer, std::vector<float>& out) {
  const BackendRegistry registry = BackendRegistry::builtin();
  ThreadPool threads(1);
  const auto states = make_state_pool(state_spec(test), 2);
  const auto backend =
      registry.find("linear")->create({test.spec, nullptr, states.get(), &threads});
  backend->reserve(
      {.max_tokens = batch.tokens, .max_q_len = batch.tokens, .max_kv_len = batch.tokens});
  backend->plan(batch);
  backend->forward(layer);
  return out;
}

fovea_state_pool* linear_states(const LinearCase& test, int32_t max_drafts = 0) {
  const StateCacheSpec pool = state_spec(test);
  fovea_state_cache_spec state;
  check_status(fovea_state_cache_spec_init(&state, sizeof state));
  state.layers = pool.layers;
  state.conv_dim = pool.conv_dim;
  state.conv_width = pool.conv_width;
  state.heads = pool.heads;
  state.rows = pool.rows;
  state.columns = pool.columns;
  state.dtype = static_cast<fovea_dtype>(pool.dtype);
  state.max_drafts = max_drafts;
  const fovea_attention_spec spec = to_c(test.spec);
  if (max_drafts > 0) check_status(fovea_draft_inputs(&spec, &state.draft_inputs));
  fovea_state_pool* states = nullptr;
  check_status(fovea_state_pool_create(&state, 2, {FOVEA_CPU, 0}, &states));
  return states;
}

fovea_linear_tensors linear_tensors(const LinearCase& test, const LinearTensors& from,
                                    int32_t length, TensorList& tensors) {
  const LinearSpec& linear = test.spec.linear;
  const AttentionKind kind = test.spec.kind;
  const int64_t channels = conv_dim_of(test.spec);
  const auto add = [&](const float* values, std::initializer_list<int64_t> shape) {
    return tensors.add(values, DType::f32, shape);
  };
  fovea_linear_tensors given{};
  given.mixed = add(from.mixed, {length, from.conv_weight ? channels : linear.conv_dim()});
  given.conv_weight = add(from.conv_weight, {channels, linear.conv_width});
  given.conv_bias = add(from.conv_bias, {channels});
  given.log_decay =
      kind == AttentionKind::kda ? add(from.log_decay, {length, linear.value_heads, linear.key_dim})
      : kind == AttentionKind::lightning ? add(from.log_decay, {linear.value_heads})
      : kind == AttentionKind::mamba1    ? add(from.log_decay, {linear.value_heads, linear.key_dim})
                                         : add(from.log_decay, {length, linear.value_heads});
  given.beta = add(from.beta, {length, linear.value_heads});
  given.skip = add(from.skip, {linear.value_heads});
  given.l2_normalise_qk = from.l2_normalise_qk;
  given.plain_conv = from.plain_conv;
  return given;
}

// Runs one call of the first sequence by C++ and by C.
void expect_same_bits(const LinearCase& test, const LinearTensors& from) {
  const LinearSpec& linear = test.spec.linear;
  const int32_t length = test.lengths.front(), slot = 1, q_indptr[] = {0, length};
  std::vector<float> out(static_cast<size_t>(length) * linear.value_heads * linear.value_dim);
  const BatchView view{.mode = ForwardMode::extend,
                       .requests = 1,
                       .tokens = length,
                       .q_indptr = q_indptr,
                       .kv_lens = {&length, 1},
                       .linear = {.state_slots = {&slot, 1}}};
  LayerTensors layer;
  layer.out = dense_rows(out.data(), DType::f32, linear.value_heads, linear.value_dim);
  layer.linear = from;
  const std::vector<float> expected = expected_linear(test, view, layer, out);
  std::fill(out.begin(), out.end(), 0.0f);

  fovea_state_pool* const states = linear_states(test);
  fovea_thread_pool* threads = nullptr;
  ASSERT_EQ(fovea_thread_pool_create(1, &threads), FOVEA_OK);
  fovea_backend* const backend = linear_backend(
      test, {.max_tokens = length, .max_q_len = length, .max_kv_len = length}, states, threads);
  TensorList tensors{Device{}};
  fovea_batch batch = to_c(view, tensors);
  fovea_layer_tensors given;
  ASSERT_EQ(fovea_layer_tensors_init(&given, sizeof given), FOVEA_OK);
  given.out = tensors.add(layer.out, length, linear.value_heads, linear.value_dim);
  given.linear = linear_tensors(test, from, length, tensors);
  ASSERT_EQ(fovea_backend_plan(backend, &batch, nullptr), FOVEA_OK) << fovea_last_error();
  ASSERT_EQ(fovea_backend_forward(backend, &given, nullptr), FOVEA_OK) << fovea_last_error();
  EXPECT_EQ(std::memcmp(out.data(), expected.data(), out.size() * sizeof(float)), 0) << test.name;
  EXPECT_EQ(fovea_state_pool_destroy(states), FOVEA_OK);
  EXPECT_EQ(fovea_backend_destroy(backend), FOVEA_OK);
  EXPECT_EQ(fovea_thread_pool_destroy(threads), FOVEA_OK);
}

TEST(LinearInC, LinearLayersGiveTheSameBits) {
  for (const LinearCase& test : linear_cases()) {
    const LinearData data = make_data(test);
    const LinearSequence& sequence = data.sequences.front();
    expect_same_bits(test, tensors_of(test, data, sequence));
    if (makes_two_calls(test)) expect_same_bits(test, convolution_of(test, data, sequence));
  }
}

// A layer of the longest sequence of a case through C, over a pool that keeps drafts.
class LayerWithDrafts {
 public:
  LayerWithDrafts(const LinearCase& test, int32_t max_drafts)
      : test_(test), data_(make_data(test)), states_(linear_states(test, max_drafts)) {
    check_status(fovea_thread_pool_create(1, &threads_));
    backend_ = linear_backend(test, {.max_tokens = 16, .max_q_len = 16, .max_kv_len = 16}, states_,
                              threads_);
  }
  ~LayerWithDrafts() {
    EXPECT_EQ(fovea_backend_destroy(backend_), FOVEA_OK);
    EXPECT_EQ(fovea_state_pool_destroy(states_), FOVEA_OK);
    EXPECT_EQ(fovea_thread_pool_destroy(threads_), FOVEA_OK);
  }
  LayerWithDrafts(const LayerWithDrafts&) = delete;
  LayerWithDrafts& operator=(const LayerWithDrafts&) = delete;

  // Computes tokens [begin, end), the last `drafts` of which are drafts.
  fovea_status run(int32_t begin, int32_t end, int32_t drafts, std::vector<float>& out) {
    const LinearSpec& linear = test_.spec.linear;
    const int32_t count = end - begin, slot = 1, q_indptr[] = {0, count};
    out.assign(static_cast<size_t>(count) * linear.value_heads * linear.value_dim, 0.0f);
    TensorList tensors{Device{}};
    std::span<const int32_t> counts;
    if (drafts > 0) counts = {&drafts, 1};
    const fovea_batch batch =
        to_c(BatchView{.mode = ForwardMode::extend,
                       .requests = 1,
                       .tokens = count,
                       .q_indptr = q_indptr,
                       .kv_lens = {&end, 1},
                       .linear = {.state_slots = {&slot, 1}, .draft_counts = counts}},
             tensors);
    const fovea_status planned = fovea_backend_plan(backend_, &batch, nullptr);
    if (planned != FOVEA_OK) return planned;
    LinearTensors from = tensors_of(test_, data_, data_.sequences[4]);
    from.mixed += begin * linear.conv_dim();
    from.log_decay += begin * linear.value_heads;
    from.beta += begin * linear.value_heads;
    fovea_layer_tensors given;
    check_status(fovea_layer_tensors_init(&given, sizeof given));
    given.out =
        tensors.add(dense_rows(out.data(), DType::f32, linear.value_heads, linear.value_dim), count,
                    linear.value_heads, linear.value_dim);
    given.linear = linear_tensors(test_, from, count, tensors);
    return fovea_backend_forward(backend_, &given, nullptr);
  }
  fovea_state_pool* states() const { return states_; }

 private:
  LinearCase test_;
  LinearData data_;
  fovea_state_pool* states_;
  fovea_thread_pool* threads_ = nullptr;
  fovea_backend* backend_ = nullptr;
};

TEST(LinearInC, SlotsKeepDrafts) {
  const LinearCase test = linear_cases().front();
  LayerWithDrafts plain(test, 0), drafting(test, 3);
  std::vector<float> want, out, rest;
  ASSERT_EQ(plain.run(0, 9, 0, want), FOVEA_OK) << fovea_last_error();
  ASSERT_EQ(drafting.run(0, 5, 3, out), FOVEA_OK) << fovea_last_error();
  // Two of three drafts are accepted.
  ASSERT_EQ(drafting.run(4, 9, 0, rest), FOVEA_OK) << fovea_last_error();
  out.resize(out.size() / 5 * 4);
  out.insert(out.end(), rest.begin(), rest.end());
  EXPECT_EQ(out, want);
  fovea_state_layer_view view;
  ASSERT_EQ(fovea_state_layer_view_init(&view, sizeof view), FOVEA_OK);
  ASSERT_EQ(fovea_state_pool_layer(drafting.states(), 0, &view), FOVEA_OK);
  EXPECT_NE(view.drafts, nullptr);
  ASSERT_EQ(fovea_state_pool_layer(plain.states(), 0, &view), FOVEA_OK);
  EXPECT_EQ(view.drafts, nullptr);

  EXPECT_EQ(plain.run(9, 11, 1, out), FOVEA_INVALID_ARGUMENT);
  EXPECT_STREQ(fovea_last_error(),
               "linear.draft_counts is given, the state pool keeps no drafts: its max_drafts is 0");
  EXPECT_EQ(drafting.run(9, 11, 3, out), FOVEA_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(fovea_last_error()).find("linear.draft_counts[0] is 3, must be in [0, 2]"),
            0U);
  fovea_attention_spec wild = to_c(test.spec);
  wild.linear.value_dim = 1 << 20;
  int32_t values = 0;
  EXPECT_EQ(fovea_draft_inputs(&wild, &values), FOVEA_INVALID_ARGUMENT);
  EXPECT_STREQ(fovea_last_error(), "linear.value_dim is 1048576, must be in [0, 16384]");
}

}  // namespace
}  // namespace fovea::test
