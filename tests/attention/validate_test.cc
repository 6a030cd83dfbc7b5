// SPDX-License-Identifier: Apache-2.0
// Errors that do not depend on the backend: specs, caches, states and limits that contradict each
// other, by field, and batches of linear layers. Values at the very edge are accepted.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "attention/prefix_levels.h"
#include "attention/validate/batch.h"
#include "attention/validate/spec.h"
#include "support/expect_error.h"

namespace fovea {
namespace {

constexpr int32_t kHuge = std::numeric_limits<int32_t>::max();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

template <typename T>
struct Wrong {
  std::string words;  // part of the message
  std::function<void(T&)> cause;
};

template <typename T, typename Check>
void expect_refused(const T& good, const Check& check, const std::vector<Wrong<T>>& table) {
  EXPECT_NO_THROW(check(good));
  for (const Wrong<T>& wrong : table) {
    T bad = good;
    wrong.cause(bad);
    test::expect_invalid(wrong.words, [&] { check(bad); });
  }
}

AttentionSpec mha() { return {.q_heads = 4, .kv_heads = 2, .head_dim = 8, .head_dim_v = 8}; }
AttentionSpec mla() {
  return {.kind = AttentionKind::mla,
          .q_heads = 4,
          .kv_heads = 1,
          .mla = {.kv_lora_rank = 16, .rope_dim = 8, .nope_dim = 4, .v_dim = 4}};
}
AttentionSpec linear() {
  return {
      .kind = AttentionKind::gated_delta_net,
      .linear = {.key_heads = 2, .value_heads = 4, .key_dim = 8, .value_dim = 16, .conv_width = 4}};
}

TEST(Validate, NamesTheFieldOfASpec) {
  expect_refused<AttentionSpec>(
      mha(), validate_spec,
      {{"q_heads is 0", [](auto& s) { s.q_heads = 0; }},
       {"kv_heads is 0", [](auto& s) { s.kv_heads = 0; }},
       {"head_dim is 0", [](auto& s) { s.head_dim = 0; }},
       {"head_dim_v is 0", [](auto& s) { s.head_dim_v = 0; }},
       {"a token has 16777224 values", [](auto& s) { s.head_dim = (1 << 22) + 2; }},
       {"a token has 16777224 values", [](auto& s) { s.head_dim_v = (1 << 22) + 2; }},
       {"q_heads is 3, must be a multiple of kv_heads 2", [](auto& s) { s.q_heads = 3; }},
       {"mla.kv_lora_rank is 1, must be 0 for kind mha", [](auto& s) { s.mla.kv_lora_rank = 1; }},
       {"mla.rope_dim is 1", [](auto& s) { s.mla.rope_dim = 1; }},
       {"mla.nope_dim is 1", [](auto& s) { s.mla.nope_dim = 1; }},
       {"mla.v_dim is 1", [](auto& s) { s.mla.v_dim = 1; }},
       {"linear.conv_width is 4", [](auto& s) { s.linear.conv_width = 4; }},
       {"linear.key_heads is 4", [](auto& s) { s.linear.key_heads = 4; }},
       {"window is -1", [](auto& s) { s.window = -1; }},
       {"chunk is -1", [](auto& s) { s.chunk = -1; }},
       {"scores.softmax_scale is -1, must be in [0, ",
        [](auto& s) { s.scores.softmax_scale = -1; }},
       {"scores.softmax_scale is inf", [](auto& s) { s.scores.softmax_scale = kInfinity; }},
       {"scores.softmax_scale is nan", [](auto& s) { s.scores.softmax_scale = NAN; }},
       {"scores.softmax_scale is 1e+38", [](auto& s) { s.scores.softmax_scale = 1e38f; }},
       {"scores.logit_cap is -1, must be 0 or in [1e-06, ",
        [](auto& s) { s.scores.logit_cap = -1; }},
       {"scores.logit_cap is inf", [](auto& s) { s.scores.logit_cap = kInfinity; }},
       {"scores.logit_cap is nan", [](auto& s) { s.scores.logit_cap = NAN; }},
       {"scores.logit_cap is 1e-45", [](auto& s) { s.scores.logit_cap = 1e-45f; }},
       {"scores.logit_cap is 1e+20", [](auto& s) { s.scores.logit_cap = 1e20f; }},
       {"kind is AttentionKind(17)", [](auto& s) { s.kind = static_cast<AttentionKind>(17); }},
       {"scope is AttentionScope(17)", [](auto& s) { s.scope = static_cast<AttentionScope>(17); }},
       {"mask is MaskKind(17)", [](auto& s) { s.mask = static_cast<MaskKind>(17); }},
       {"q_dtype is DType(17)", [](auto& s) { s.q_dtype = static_cast<DType>(17); }},
       {"q_dtype is fp8_e5m2, of fp8 types", [](auto& s) { s.q_dtype = DType::f8e5m2; }},
       {"has_rope: q of fp8_e4m3 cannot be rotated", [](auto& s) {
          s.q_dtype = DType::f8e4m3;
          s.has_rope = true;
        }}});
  AttentionSpec encoder = mha();
  encoder.scope = AttentionScope::encoder;
  expect_refused<AttentionSpec>(
      encoder, validate_spec,
      {{"window 3 and chunk 0 need scope decoder", [](auto& s) { s.window = 3; }},
       {"window 0 and chunk 3 need scope decoder", [](auto& s) { s.chunk = 3; }},
       {"mask tree needs scope decoder", [](auto& s) { s.mask = MaskKind::tree; }},
       {"has_rope needs decoder", [](auto& s) { s.has_rope = true; }},
       {"needs kind mha and a cache", [](auto& s) { s.q_dtype = DType::f8e4m3; }}});
  AttentionSpec cross = mha();
  cross.scope = AttentionScope::cross;
  expect_refused<AttentionSpec>(
      cross, validate_spec,
      {{"mask custom needs scope decoder", [](auto& s) { s.mask = MaskKind::custom; }},
       {"scores.has_alibi", [](auto& s) { s.scores.has_alibi = true; }}});
}

TEST(Validate, NamesTheFieldOfLatentAndLinearSpecs) {
  expect_refused<AttentionSpec>(
      mla(), validate_spec,
      {{"kv_heads is 2, kind mla has 1", [](auto& s) { s.kv_heads = 2; }},
       {"kind mla has decoder only", [](auto& s) { s.scope = AttentionScope::encoder; }},
       {"mla.kv_lora_rank is 0", [](auto& s) { s.mla.kv_lora_rank = 0; }},
       {"mla.rope_dim is -1", [](auto& s) { s.mla.rope_dim = -1; }},
       {"head_dim is 24, must be 0 for kind mla", [](auto& s) { s.head_dim = 24; }},
       {"a token has 8589934652 values", [](auto& s) { s.mla.rope_dim = kHuge; }},
       {"head_dim_v is 16, must be 0 for kind mla", [](auto& s) { s.head_dim_v = 16; }},
       {"linear.value_dim is 1", [](auto& s) { s.linear.value_dim = 1; }},
       {"mla.nope_dim 0 and mla.v_dim 4", [](auto& s) { s.mla.nope_dim = 0; }},
       {"mla.nope_dim 4 and mla.v_dim 0", [](auto& s) { s.mla.v_dim = 0; }},
       {"mla.nope_dim -1 and mla.v_dim -1", [](auto& s) { s.mla.nope_dim = s.mla.v_dim = -1; }},
       {"scores.softmax_scale is 0, absorbed", [](auto& s) { s.mla.nope_dim = s.mla.v_dim = 0; }},
       {"needs kind mha and a cache", [](auto& s) { s.q_dtype = DType::f8e4m3; }},
       {"has_rope needs a rotary key", [](auto& s) {
          s.has_rope = true;
          s.mla.rope_dim = 0;
        }}});
  AttentionSpec absorbed = mla();
  absorbed.mla.nope_dim = absorbed.mla.v_dim = 0;
  absorbed.scores.softmax_scale = 0.5f;
  EXPECT_NO_THROW(validate_spec(absorbed));
  expect_refused<AttentionSpec>(
      linear(), validate_spec,
      {{"linear.value_heads is 3, must be a multiple of linear.key_heads 2",
        [](auto& s) { s.linear.value_heads = 3; }},
       {"linear.key_dim is 0", [](auto& s) { s.linear.key_dim = 0; }},
       {"linear.conv_width is -1", [](auto& s) { s.linear.conv_width = -1; }},
       {"q_heads is 2, must be 0 for kind gated_delta_net", [](auto& s) { s.q_heads = 2; }},
       {"head_dim is 8, must be 0 for kind gated_delta_net", [](auto& s) { s.head_dim = 8; }},
       {"linear kinds have decoder only", [](auto& s) { s.scope = AttentionScope::encoder; }},
       {"mask is tree", [](auto& s) { s.mask = MaskKind::tree; }},
       {"window is 1", [](auto& s) { s.window = 1; }},
       {"chunk is 1", [](auto& s) { s.chunk = 1; }},
       {"scores.logit_cap is 1", [](auto& s) { s.scores.logit_cap = 1; }},
       {"scores.has_sinks is 1", [](auto& s) { s.scores.has_sinks = true; }},
       {"scores.has_alibi is 1", [](auto& s) { s.scores.has_alibi = true; }},
       {"needs_lse is 1", [](auto& s) { s.needs_lse = true; }},
       {"has_rope needs mha or mla", [](auto& s) { s.has_rope = true; }}});
}

TEST(Validate, WhatIsJustInsideIsServed) {
  using Change = void (*)(AttentionSpec&);
  for (const Change change : std::vector<Change>{
           [](auto& s) { s = {.q_heads = 1, .kv_heads = 1, .head_dim = 1, .head_dim_v = 1}; },
           [](auto& s) { s.head_dim = 1 << 22; },
           [](auto& s) {
             s.scope = AttentionScope::encoder_cache;
             s.has_rope = true;
           },
           [](auto& s) {
             s.scope = AttentionScope::ragged;
             s.window = s.chunk = 3;
           },
           [](auto& s) {
             s.scope = AttentionScope::encoder;
             s.mask = MaskKind::custom;
             s.scores.has_alibi = true;
           },
           [](auto& s) {
             s = mla();
             s.has_rope = true;
           }}) {
    AttentionSpec spec = mha();
    change(spec);
    EXPECT_NO_THROW(validate_spec(spec));
  }
  BatchLimits limits{.max_requests = 1, .max_tokens = 1, .max_q_len = 1, .max_kv_len = 1};
  limits.prefix_levels = kMaxPrefixLevels;
  limits.min_prefix_savings = 0;
  EXPECT_NO_THROW(validate_limits(mha(), limits));
  AttentionSpec fp8 = mha();
  fp8.q_dtype = DType::f8e4m3;
  KvCacheSpec cache{.layers = 0, .kv_heads = 2, .head_dim = 8, .head_dim_v = 8};
  cache.dtype = DType::f8e4m3;
  cache.order = KvOrder::hnd;
  EXPECT_NO_THROW(validate_cache(fp8, cache));
}

TEST(Validate, ScalesHaveTheirKindsDefault) {
  AttentionSpec spec{.head_dim = 16};
  EXPECT_EQ(softmax_scale(spec), 0.25f);
  spec.scores.softmax_scale = 3;
  EXPECT_EQ(softmax_scale(spec), 3);
  EXPECT_EQ(softmax_scale({.kind = AttentionKind::mla, .mla = {.rope_dim = 48, .nope_dim = 16}}),
            0.125f);
}

TEST(Validate, NamesTheFieldOfACache) {
  const auto of = [](const AttentionSpec& spec) {
    return [spec](const KvCacheSpec& cache) { validate_cache(spec, cache); };
  };
  KvCacheSpec cache{.layers = 1, .kv_heads = 2, .head_dim = 8, .head_dim_v = 8, .page_size = 1};
  expect_refused<KvCacheSpec>(
      cache, of(mha()),
      {{"page_size is 0", [](auto& c) { c.page_size = 0; }},
       {"layers is -1", [](auto& c) { c.layers = -1; }},
       {"KvOrder(9)", [](auto& c) { c.order = static_cast<KvOrder>(9); }},
       {"cache layout is KvLayout(9)", [](auto& c) { c.layout = static_cast<KvLayout>(9); }},
       {"cache scale is KvScale(9)", [](auto& c) { c.scale = static_cast<KvScale>(9); }},
       {"cache dtype is DType(9)", [](auto& c) { c.dtype = static_cast<DType>(9); }},
       {"kind mha needs mha", [](auto& c) { c.layout = KvLayout::mla; }},
       {"kv_heads is 1, the layers have 2", [](auto& c) { c.kv_heads = 1; }},
       {"head_dim is 4, the layers have 8", [](auto& c) { c.head_dim = 4; }},
       {"head_dim_v is 4, the layers have 8", [](auto& c) { c.head_dim_v = 4; }},
       {"window is -1", [](auto& c) { c.window = -1; }},
       {"it drops keys the layers still see", [](auto& c) { c.window = 64; }}});
  AttentionSpec fp8 = mha();
  fp8.q_dtype = DType::f8e4m3;
  test::expect_invalid("q_dtype fp8_e4m3 needs the same", [&] { validate_cache(fp8, cache); });
  AttentionSpec windowed = mha();
  cache.window = 64;
  for (int32_t AttentionSpec::*reach : {&AttentionSpec::window, &AttentionSpec::chunk}) {
    windowed.window = windowed.chunk = 0;
    windowed.*reach = 64;
    EXPECT_NO_THROW(validate_cache(windowed, cache));
    windowed.*reach = 65;
    test::expect_invalid("it drops keys", [&] { validate_cache(windowed, cache); });
  }
  AttentionSpec encoder = mha();
  encoder.scope = AttentionScope::encoder;
  EXPECT_NO_THROW(validate_cache(encoder, {})) << "which has none";
}

TEST(Validate, RowsOf656BytesHoldTheLatentsTheyAreMadeFor) {
  AttentionSpec spec = mla();
  spec.mla.kv_lora_rank = 512;
  spec.mla.rope_dim = 64;
  KvCacheSpec cache{.layers = 1, .kv_heads = 1, .head_dim = 576, .head_dim_v = 512};
  cache.layout = KvLayout::mla_fp8_rows;
  cache.dtype = DType::f8e4m3;
  EXPECT_NO_THROW(validate_cache(spec, cache));
  cache.dtype = DType::bf16;
  test::expect_invalid("the cache dtype is bf16", [&] { validate_cache(spec, cache); });
  cache.dtype = DType::f8e4m3;
  spec.mla.rope_dim = 32;
  cache.head_dim = 544;
  test::expect_invalid("the layers have 512 + 32", [&] { validate_cache(spec, cache); });
  spec.mla.kv_lora_rank = cache.head_dim_v = 480;
  spec.mla.rope_dim = 64;
  test::expect_invalid("the layers have 480 + 64", [&] { validate_cache(spec, cache); });
  cache.layout = KvLayout::mha;
  test::expect_invalid("needs mla or mla_fp8_rows", [&] { validate_cache(spec, cache); });
}

TEST(Validate, NamesTheFieldOfAState) {
  StateCacheSpec state;
  state.heads = 4;
  state.rows = 16;
  state.columns = 8;
  state.conv_dim = 2 * 2 * 8 + 4 * 16;
  state.conv_width = 4;
  expect_refused<StateCacheSpec>(
      state, [](const StateCacheSpec& s) { validate_state(linear(), s); },
      {{"heads is 2, the layers have value_heads 4", [](auto& s) { s.heads = 2; }},
       {"rows is 8, the layers have value_dim 16", [](auto& s) { s.rows = 8; }},
       {"columns is 16, the layers have key_dim 8", [](auto& s) { s.columns = 16; }},
       {"conv_dim is 95, the layers have 96", [](auto& s) { s.conv_dim = 95; }},
       {"conv_width is 3, the layers have 4", [](auto& s) { s.conv_width = 3; }},
       {"max_drafts is -1, must be in [0, 64]", [](auto& s) { s.max_drafts = -1; }},
       {"draft_inputs is 0, draft_row() of the layers has size 168",
        [](auto& s) { s.max_drafts = 1; }}});
  AttentionSpec without = linear();
  without.linear.conv_width = 0;
  state.conv_dim = state.conv_width = 7;
  EXPECT_NO_THROW(validate_state(without, state));
}

TEST(Validate, NamesTheLimit) {
  const auto of = [](const AttentionSpec& spec) {
    return [spec](const BatchLimits& limits) { validate_limits(spec, limits); };
  };
  const BatchLimits good{
      .max_requests = 2, .max_tokens = 2, .max_q_len = 2, .max_kv_len = 2, .max_encoder_len = 1};
  expect_refused<BatchLimits>(
      good, of(mha()),
      {{"max_requests is 0", [](auto& l) { l.max_requests = 0; }},
       {"max_tokens is 0", [](auto& l) { l.max_tokens = 0; }},
       {"max_tokens is 2147483647, at most", [](auto& l) { l.max_tokens = INT32_MAX; }},
       {"max_q_len is 0", [](auto& l) { l.max_q_len = 0; }},
       {"max_kv_len is 0", [](auto& l) { l.max_kv_len = 0; }},
       {"max_encoder_len is -1", [](auto& l) { l.max_encoder_len = -1; }},
       {"prefix_levels is -1", [](auto& l) { l.prefix_levels = -1; }},
       {"prefix_levels is 99", [](auto& l) { l.prefix_levels = 99; }},
       {"min_prefix_savings is -1", [](auto& l) { l.min_prefix_savings = -1; }}});
  AttentionSpec cross = mha();
  cross.scope = AttentionScope::cross;
  expect_refused<BatchLimits>(
      good, of(cross), {{"scope cross needs at least 1", [](auto& l) { l.max_encoder_len = 0; }}});
}

// Three requests of linear layers, the second without new tokens.
struct ThreeStates {
  std::vector<int32_t> q_indptr{0, 2, 2, 3}, kv_lens{5, 0, 1}, states{2, 3, 1}, snapshots{4, -1, 5};
  BatchView view() const {
    BatchView batch{.mode = ForwardMode::extend, .requests = 3, .tokens = 3};
    batch.q_indptr = q_indptr;
    batch.kv_lens = kv_lens;
    batch.linear.state_slots = states;
    batch.linear.snapshot_slots = snapshots;
    return batch;
  }
};

TEST(Validate, StatesHaveOneOwner) {
  BatchRules rules{.spec = linear(), .state_slots = 6};
  rules.limits = {.max_requests = 3, .max_tokens = 3, .max_q_len = 3, .max_kv_len = 5};
  const auto check = [&](const ThreeStates& batch) { validate_batch(batch.view(), rules); };
  expect_refused<ThreeStates>(
      {}, check,
      {{"linear.state_slots[2] is 6, must be in [-1, 6)", [](auto& b) { b.states[2] = 6; }},
       {"state_slots[0] is -2", [](auto& b) { b.states[0] = -2; }},
       {"linear.state_slots[2] is 2, which is linear.state_slots[0]",
        [](auto& b) { b.states[2] = 2; }},
       {"snapshot_slots[0] is 6, must be in [-1, 6)", [](auto& b) { b.snapshots[0] = 6; }},
       {"snapshot_slots[2] is -2", [](auto& b) { b.snapshots[2] = -2; }},
       {"snapshot_slots[0] is 2, which is linear.state_slots[0]",
        [](auto& b) { b.snapshots[0] = 2; }},
       {"snapshot_slots[0] is 1, which is linear.state_slots[2]",
        [](auto& b) { b.snapshots[0] = 1; }},
       {"snapshot_slots[1] is 3, which is linear.state_slots[1]",
        [](auto& b) { b.snapshots[1] = 3; }},
       {"snapshot_slots[2] is 4, which is linear.snapshot_slots[0]",
        [](auto& b) { b.snapshots[2] = 4; }}});
  for (const int32_t nobody : {0, -1}) {  // the dummy, and none
    ThreeStates batch;
    batch.states[0] = batch.states[2] = nobody;
    EXPECT_NO_THROW(check(batch));
  }
  for (const size_t other : {0u, 2u}) {  // that of a request without new tokens
    ThreeStates idle;
    idle.states[1] = idle.states[other];
    EXPECT_NO_THROW(check(idle));
  }
  const ThreeStates good;
  BatchView without = good.view();
  without.linear.snapshot_slots = {};
  EXPECT_NO_THROW(validate_batch(without, rules));
  without.linear.state_slots = {};
  test::expect_invalid("linear.state_slots is absent", [&] { validate_batch(without, rules); });
}

// Checks the second request, with keys [0, 10) and new tokens at 6 to 9 unless the case differs.
TEST(Validate, FirstKeysAreThoseThatSomeQuerySees) {
  struct Case {
    int32_t window, chunk;
    std::vector<int32_t> spans;
    int32_t q_len, kv_len, first;
    std::vector<int32_t> positions;
  };
  for (const Case& c : std::vector<Case>{{0, 0, {}, 4, 10, 0, {}},
                                         {1, 0, {}, 4, 10, 6, {}},
                                         {3, 0, {}, 4, 10, 4, {}},
                                         {7, 0, {}, 4, 10, 0, {}},
                                         {0, 4, {}, 4, 10, 4, {}},
                                         {0, 1, {}, 4, 10, 6, {}},
                                         {3, 5, {}, 4, 10, 5, {}},
                                         {1, 0, {2, 7}, 4, 10, 2, {}},
                                         {1, 0, {2, 6}, 4, 10, 6, {}},
                                         {1, 0, {0, 6, 3, 8}, 4, 10, 3, {}},
                                         {3, 0, {}, 0, 10, 10, {}},
                                         {3, 0, {}, 4, 0, 0, {}},
                                         {3, 0, {}, 4, 10, 3, {7, 5, 6, 9}},
                                         {1, 0, {}, 4, 10, 6, {9, 9, 9, 9}}}) {
    AttentionSpec spec = mha();
    spec.window = c.window;
    spec.chunk = c.chunk;
    if (!c.spans.empty()) spec.mask = MaskKind::prefix_spans;
    const std::vector<int32_t> q_indptr{0, 2, 2 + c.q_len}, kv_lens{2, c.kv_len};
    std::vector<int32_t> spans{0, 2}, positions{0, 1};
    spans.insert(spans.end(), c.spans.begin(), c.spans.end());
    positions.insert(positions.end(), c.positions.begin(), c.positions.end());
    const std::vector<int32_t> span_indptr{0, 1, static_cast<int32_t>(spans.size() / 2)};
    BatchView batch{.mode = ForwardMode::extend, .requests = 2, .tokens = 2 + c.q_len};
    batch.q_indptr = q_indptr;
    batch.kv_lens = kv_lens;
    batch.masks.spans.bounds = spans;
    batch.masks.spans.indptr = span_indptr;
    if (!c.positions.empty()) batch.positions = positions;
    std::vector<int32_t> first(2, -1);
    find_first_keys(batch, spec, first.data());
    EXPECT_EQ(first, (std::vector<int32_t>{0, c.first}))
        << "window " << c.window << " chunk " << c.chunk << " of " << c.q_len;
  }
}

}  // namespace
}  // namespace fovea
