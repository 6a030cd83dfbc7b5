// SPDX-License-Identifier: Apache-2.0
// Errors of forward(), and results of small batches.
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "attention/two_requests.h"

namespace fovea {
namespace {

using test::error_of;
using test::expect_invalid;
using test::kContext;
using test::kPage;
using test::kPages;
using Fixture = test::TwoRequests;

constexpr int64_t kFar = std::numeric_limits<int64_t>::max();

// Moves a pointer by one byte.
template <typename T>
void step(const T*& array) {
  array = reinterpret_cast<const T*>(reinterpret_cast<const char*>(array) + 1);
}

// Words of an error, and the change to valid tensors that causes it.
using Changes = std::vector<std::pair<const char*, std::function<void(LayerTensors&)>>>;

void expect_refused(Fixture& fixture, const LayerTensors& good, const Changes& changes) {
  for (const auto& [words, change] : changes) {
    LayerTensors layer = good;
    change(layer);
    expect_invalid(words, [&] { fixture.backend->forward(layer); });
  }
}

TEST(Forward, RefusesTensorsThatDoNotFit) {
  std::vector<float> rows(5 * 2 * 8), lse(10);
  const HeadRows two = dense_rows(rows.data(), DType::f32, 2, 8);
  const HeadRows one = dense_rows(rows.data(), DType::f32, 1, 8);
  const LayerTensors good{.q = two, .k = one, .v = one, .out = two};
  const auto with = [&](const std::function<void(LayerTensors&)>& change) {
    LayerTensors layer = good;
    change(layer);
    return layer;
  };
  const Changes wrong = {
      {"v is null", [](auto& t) { t.v = {}; }},
      {"v is given, but k is null", [](auto& t) { t.k = {}; }},
      {"v is given, but k is null",
       [](auto& t) {
         t.k = {};
         t.save_kv = false;
       }},
      {"out is null", [](auto& t) { t.out = {}; }},
      {"q is null and there is no k", [](auto& t) { t.q = t.k = t.v = {}; }},
      {"q is bf16, the spec's q_dtype asks for fp32", [](auto& t) { t.q.dtype = DType::bf16; }},
      {"must be aligned to 4 bytes", [](auto& t) { t.q.data = static_cast<char*>(t.q.data) + 2; }},
      {"k is fp16", [](auto& t) { t.k.dtype = DType::f16; }},
      {"needs_lse is false", [&](auto& t) { t.lse = NaturalLse(lse.data()); }},
      {"scores.sinks is given", [&](auto& t) { t.scores.sinks = lse.data(); }},
      {"scores.alibi_slopes is given", [&](auto& t) { t.scores.alibi_slopes = lse.data(); }},
      {"q_scale is given", [&](auto& t) { t.q_scale.data = lse.data(); }},
      {"mla.q_rope is given, but the spec's kind is mha", [&](auto& t) { t.mla.q_rope = two; }},
      {"mla.latent is given, but the spec's kind is mha", [&](auto& t) { t.mla.latent = two; }},
      {"mla.k_rope is given, but the spec's kind is mha", [&](auto& t) { t.mla.k_rope = two; }},
      {"mla.weights is given, but the spec's kind is mha",
       [&](auto& t) { t.mla.weights.w_uk = t.mla.weights.w_uv = lse.data(); }},
      {"mla.weights is given", [&](auto& t) { t.mla.weights.w_uv = lse.data(); }},
      {"linear is given, but the spec's kind is mha",
       [&](auto& t) { t.linear.mixed = lse.data(); }},
      {"out has strides of 0 a token and 8 a head: rows of 8 values overlap",
       [](auto& t) { t.out.token_stride = 0; }},
      {"out has strides of 16 a token and 7 a head", [](auto& t) { t.out.head_stride = 7; }},
      {"out has strides of 15 a token and 8 a head", [](auto& t) { t.out.token_stride = 15; }},
      {"out has strides of 8 a token and 39 a head",
       [](auto& t) {
         t.out.token_stride = 8;
         t.out.head_stride = 39;
       }},
      {"out has strides of -16 a token", [](auto& t) { t.out.token_stride = -16; }},
      {"q at", [](auto& t) { t.q.token_stride = kFar; }},
      {"k at", [](auto& t) { t.k.token_stride = std::numeric_limits<int64_t>::min(); }},
      {"v at", [](auto& t) { t.v.token_stride = kFar / 4; }},
      {"out at", [](auto& t) { t.out.token_stride = kFar; }},
      {"addresses exceed 63 bits", [](auto& t) { t.out.head_stride = kFar; }},
      {"layer is 1", [](auto& t) { t.layer = 1; }},
  };
  Fixture fixture;
  fixture.create();
  fixture.backend->plan(fixture.batch);
  fixture.backend->forward(good);
  fixture.backend->forward(with([](auto& t) {  // head by head
    t.out.token_stride = 8;
    t.out.head_stride = 5 * 8;
  }));
  expect_refused(fixture, good, wrong);
  fixture.batch.out_slots = {};
  fixture.backend->plan(fixture.batch);
  expect_invalid("out_slots is absent", [&] { fixture.backend->forward(good); });
  fixture.backend->forward(with([](auto& t) { t.save_kv = false; }));
}

// Covers widths of 1.
TEST(Forward, RefusesLatentTensorsThatDoNotFit) {
  std::vector<float> values(5 * 2 * 8);
  const auto rows = [&](int32_t heads, int32_t dim) {
    return dense_rows(values.data(), DType::f32, heads, dim);
  };
  LayerTensors good{.q = rows(2, 1), .out = rows(2, 1)};
  good.mla = {.latent = rows(1, 6),
              .k_rope = rows(1, 2),
              .q_rope = rows(2, 2),
              .weights = {.w_uk = values.data(), .w_uv = values.data()}};
  Fixture fixture;
  fixture.spec = {.kind = AttentionKind::mla, .q_heads = 2, .kv_heads = 1};
  fixture.spec.mla = {.kv_lora_rank = 6, .rope_dim = 2, .nope_dim = 1, .v_dim = 1};
  fixture.cache.head_dim_v = 6;
  fixture.cache.layout = KvLayout::mla;
  fixture.create();
  fixture.backend->plan(fixture.batch);
  fixture.backend->forward(good);
  const Changes wrong = {
      {"mla.q_rope is fp16", [](auto& t) { t.mla.q_rope.dtype = DType::f16; }},
      {"mla.k_rope is null", [](auto& t) { t.mla.k_rope = {}; }},
      {"mla.k_rope is given, but mla.latent is null", [](auto& t) { t.mla.latent = {}; }},
      {"k is given, but the spec's kind is mla", [](auto& t) { t.k = t.mla.latent; }},
      {"mla.weights are null, but the spec's mla.nope_dim is 1",
       [](auto& t) { t.mla.weights = {}; }},
      {"mla.weights are half given", [](auto& t) { t.mla.weights.w_uk = nullptr; }},
      {"mla.weights are half given", [](auto& t) { t.mla.weights.w_uv = nullptr; }},
      {"rows of 1 values overlap", [](auto& t) { t.out.head_stride = 0; }},
      {"mla.q_rope at", [](auto& t) { t.mla.q_rope.head_stride = kFar; }},
      {"mla.weights.dtype is DType(17)",
       [](auto& t) { t.mla.weights.dtype = static_cast<DType>(17); }},
      {"mla.weights.dtype is fp8_e4m3", [](auto& t) { t.mla.weights.dtype = DType::f8e4m3; }},
      {"mla.weights.w_uk is at", [](auto& t) { step(t.mla.weights.w_uk); }},
      {"mla.weights.w_uk_head_stride is -6, must be 0 or at least 6, the values of a head",
       [](auto& t) { t.mla.weights.w_uk_head_stride = -6; }},
      {"mla.weights.w_uv_head_stride is 5", [](auto& t) { t.mla.weights.w_uv_head_stride = 5; }},
      {"w_uk at", [](auto& t) { t.mla.weights.w_uk_head_stride = kFar; }},
  };
  expect_refused(fixture, good, wrong);
}

TEST(Forward, LatentsMayHaveNoRotaryKey) {
  std::vector<float> values(5 * 2 * 8);
  const HeadRows two = dense_rows(values.data(), DType::f32, 2, 8);
  const HeadRows one = dense_rows(values.data(), DType::f32, 1, 8);
  Fixture fixture;
  fixture.spec = {.kind = AttentionKind::mla, .q_heads = 2, .kv_heads = 1};
  fixture.spec.mla.kv_lora_rank = 8;
  fixture.spec.scores.softmax_scale = 1;
  fixture.cache.layout = KvLayout::mla;
  fixture.create();
  fixture.backend->plan(fixture.batch);
  fixture.backend->forward({.q = two, .out = two, .mla = {.latent = one}});
}

TEST(Forward, RefusesPackedBatchesWithoutKeys) {
  std::vector<float> values(5 * 2 * 8);
  const HeadRows two = dense_rows(values.data(), DType::f32, 2, 8);
  const HeadRows one = dense_rows(values.data(), DType::f32, 1, 8);
  Fixture fixture;
  fixture.spec.scope = AttentionScope::ragged;
  fixture.kv_lens = {2, 3};
  fixture.batch.out_slots = {};  // nothing is stored
  fixture.create();
  fixture.backend->plan(fixture.batch);
  fixture.backend->forward({.q = two, .k = one, .v = one, .out = two});
  expect_invalid("k is null", [&] { fixture.backend->forward({.q = two, .out = two}); });
}

TEST(Forward, RefusesRotationsThatDoNotFit) {
  std::vector<float> rows(5 * 2 * 8), table(4);
  const std::vector<int32_t> positions(5);
  const RotaryTensors good{.cos = table.data(),
                           .sin = table.data(),
                           .max_positions = 1,
                           .rotary_dim = 8,
                           .positions = positions.data()};
  const std::vector<int32_t> beyond(5, 1);
  const auto with = [&](const std::function<void(RotaryTensors&)>& change) {
    RotaryTensors rotary = good;
    change(rotary);
    return rotary;
  };
  const std::vector<std::pair<const char*, RotaryTensors>> wrong = {
      {"rotary.cos is null, but the spec's has_rope is true", {}},
      {"rotary.sin is null", with([](auto& r) { r.sin = nullptr; })},
      {"rotary.positions is null", with([](auto& r) { r.positions = nullptr; })},
      {"rotary.max_positions is 0", with([](auto& r) { r.max_positions = 0; })},
      {"rotary.rotary_dim is 7, must be even and in [2, 8]",
       with([](auto& r) { r.rotary_dim = 7; })},
      {"rotary.rotary_dim is 0", with([](auto& r) { r.rotary_dim = 0; })},
      {"rotary.rotary_dim is 10", with([](auto& r) { r.rotary_dim = 10; })},
      {"rotary.cos is at", with([](auto& r) { step(r.cos); })},
      {"rotary.positions is at", with([](auto& r) { step(r.positions); })},
      {"rotary.positions[0] is", with([&](auto& r) { r.positions = beyond.data(); })},
  };
  Fixture fixture;
  fixture.spec.has_rope = true;
  fixture.create();
  fixture.backend->plan(fixture.batch);
  LayerTensors layer{.q = dense_rows(rows.data(), DType::f32, 2, 8),
                     .k = dense_rows(rows.data(), DType::f32, 1, 8),
                     .v = dense_rows(rows.data(), DType::f32, 1, 8),
                     .out = dense_rows(rows.data(), DType::f32, 2, 8)};
  layer.rotary = good;
  fixture.backend->forward(layer);
  for (const auto& [words, rotary] : wrong) {
    layer.rotary = rotary;
    expect_invalid(words, [&] { fixture.backend->forward(layer); });
  }
  fixture.spec.has_rope = false;
  fixture.create();
  fixture.backend->plan(fixture.batch);
  layer.rotary = good;
  expect_invalid("rotary.cos is given", [&] { fixture.backend->forward(layer); });
}

TEST(Forward, NeedsAReserveAndAPlan) {
  Fixture fixture;
  fixture.pool = make_kv_pool(fixture.cache, kPages);
  fixture.backend =
      reference_backend().create({fixture.spec, fixture.pool.get(), nullptr, &fixture.threads});
  EXPECT_EQ(error_of([&] { fixture.backend->plan(fixture.batch); }), "plan() before reserve()");
  fixture.backend->reserve(fixture.limits);
  EXPECT_EQ(error_of([&] { fixture.backend->forward({}); }), "forward() without a plan");
  fixture.backend->plan(fixture.batch);
  fixture.backend->reserve(fixture.limits);
  EXPECT_EQ(error_of([&] { fixture.backend->forward({}); }), "forward() without a plan");
}

TEST(Forward, IdleAndEmptyBatchesTouchNothing) {
  Fixture fixture;
  fixture.create();
  fixture.backend->plan({.mode = ForwardMode::idle, .requests = 7, .tokens = 99});
  fixture.backend->forward({});
  fixture.backend->plan({.mode = ForwardMode::decode});
  fixture.backend->forward({});
}

TEST(Forward, WithoutQueriesItOnlyStores) {
  Fixture fixture;
  fixture.create();
  std::vector<float> k(5 * 8), v(5 * 8);
  for (size_t i = 0; i < k.size(); ++i) k[i] = static_cast<float>(i + 1), v[i] = -k[i];
  fixture.backend->plan(fixture.batch);
  fixture.backend->forward(
      {.k = dense_rows(k.data(), DType::f32, 1, 8), .v = dense_rows(v.data(), DType::f32, 1, 8)});
  const KvLayerView view = fixture.pool->layer(0);
  for (size_t token = 0; token < 5; ++token) {
    const auto* stored =
        reinterpret_cast<const float*>(v_address(view, fixture.out_slots[token], 0));
    EXPECT_EQ(stored[0], v[token * 8]);
  }
}

// A cross cache is filled by a batch of the encoder's tokens without queries, then read.
TEST(Forward, CrossAttentionReadsWhatTheEncoderStored) {
  Fixture fixture;
  fixture.spec.scope = AttentionScope::cross;
  fixture.create();
  const int32_t q_indptr[] = {0, 3, 3};
  fixture.encoder_lens = {3, 0};
  BatchView fill = fixture.batch;
  fill.tokens = 3;
  fill.q_indptr = q_indptr;
  fill.kv_lens = {};
  fill.cross.lens = fixture.encoder_lens;
  const std::vector<int64_t> out_slots(fixture.slots.begin() + kContext,
                                       fixture.slots.begin() + kContext + 3);
  fill.out_slots = out_slots;
  std::vector<float> k(3 * 8, 0), v(3 * 8), q(5 * 2 * 8, 1), out(5 * 2 * 8, -1);
  for (size_t i = 0; i < v.size(); ++i) v[i] = static_cast<float>(i / 8 + 1);
  fixture.backend->plan(fill);
  fixture.backend->forward(
      {.k = dense_rows(k.data(), DType::f32, 1, 8), .v = dense_rows(v.data(), DType::f32, 1, 8)});

  BatchView decode = fixture.batch;
  decode.cross.lens = fixture.encoder_lens;
  decode.out_slots = {};
  fixture.backend->plan(decode);
  fixture.backend->forward({.q = dense_rows(q.data(), DType::f32, 2, 8),
                            .out = dense_rows(out.data(), DType::f32, 2, 8)});
  // Equal scores: the mean of 1, 2 and 3. The second request has no encoder tokens.
  for (size_t i = 0; i < out.size(); ++i) EXPECT_FLOAT_EQ(out[i], i < 2 * 2 * 8 ? 2.0f : 0.0f);
}

// Arrays that only some specs have.
TEST(Forward, RefusesMisalignedExtras) {
  std::vector<float> rows(5 * 2 * 8), extra(16);
  Fixture fixture;
  fixture.spec.needs_lse = fixture.spec.scores.has_sinks = fixture.spec.scores.has_alibi = true;
  fixture.create();
  fixture.backend->plan(fixture.batch);
  LayerTensors good{.q = dense_rows(rows.data(), DType::f32, 2, 8),
                    .k = dense_rows(rows.data(), DType::f32, 1, 8),
                    .v = dense_rows(rows.data(), DType::f32, 1, 8),
                    .out = dense_rows(rows.data(), DType::f32, 2, 8)};
  good.lse = NaturalLse(extra.data());
  good.scores = {.sinks = extra.data(), .alibi_slopes = extra.data()};
  fixture.backend->forward(good);
  const Changes wrong = {
      {"lse is at",
       [](auto& t) {
         const float* lse = t.lse.data;
         step(lse);
         t.lse = NaturalLse(const_cast<float*>(lse));
       }},
      {"scores.sinks is at", [](auto& t) { step(t.scores.sinks); }},
      {"scores.alibi_slopes is at", [](auto& t) { step(t.scores.alibi_slopes); }},
  };
  expect_refused(fixture, good, wrong);
}

TEST(Forward, RefusesScalesOfQueriesThatDoNotFit) {
  std::vector<uint8_t> q(5 * 2 * 8);
  std::vector<uint16_t> rows(q.size());
  std::vector<float> scale(10, 1.0f);
  Fixture fixture;
  fixture.spec.q_dtype = fixture.cache.dtype = DType::f8e4m3;
  fixture.create();
  fixture.backend->plan(fixture.batch);
  LayerTensors good{.q = dense_rows(q.data(), DType::f8e4m3, 2, 8),
                    .k = dense_rows(rows.data(), DType::bf16, 1, 8),
                    .v = dense_rows(rows.data(), DType::bf16, 1, 8),
                    .out = dense_rows(rows.data(), DType::bf16, 2, 8)};
  good.q_scale = {.data = scale.data(), .token_stride = 2, .head_stride = 1};
  fixture.backend->forward(good);
  expect_refused(fixture, good,
                 {{"q_scale is at", [](auto& t) { step(t.q_scale.data); }},
                  {"q_scale at", [](auto& t) { t.q_scale.token_stride = kFar; }}});
}

}  // namespace
}  // namespace fovea
