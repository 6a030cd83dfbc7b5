// SPDX-License-Identifier: Apache-2.0
// What creation, reserve() and forward() refuse, and what little batches do.
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
  const std::vector<std::pair<const char*, LayerTensors>> wrong = {
      {"v is null", with([](auto& t) { t.v = {}; })},
      {"out is null", with([](auto& t) { t.out = {}; })},
      {"q is null and there is no k", with([](auto& t) { t.q = t.k = {}; })},
      {"q is bf16, the spec's q_dtype asks for fp32",
       with([](auto& t) { t.q.dtype = DType::bf16; })},
      {"must be aligned to 4 bytes",
       with([](auto& t) { t.q.data = static_cast<char*>(t.q.data) + 2; })},
      {"k is fp16", with([](auto& t) { t.k.dtype = DType::f16; })},
      {"needs_lse is false", with([&](auto& t) { t.lse = NaturalLse(lse.data()); })},
      {"sinks is given", with([&](auto& t) { t.sinks = lse.data(); })},
      {"alibi_slopes is given", with([&](auto& t) { t.alibi_slopes = lse.data(); })},
      {"q_scale is given", with([&](auto& t) { t.q_scale = lse.data(); })},
      {"q_rope is given, but the spec's kind is mha", with([&](auto& t) { t.q_rope = two; })},
      {"mla_weights are given, but the spec's nope_dim is 0",
       with([&](auto& t) { t.mla_weights.w_uk = t.mla_weights.w_uv = lse.data(); })},
      {"mla_weights are half given", with([&](auto& t) { t.mla_weights.w_uk = lse.data(); })},
      {"mla_weights are half given", with([&](auto& t) { t.mla_weights.w_uv = lse.data(); })},
      {"linear is given, but the spec's kind is mha",
       with([&](auto& t) { t.linear.mixed = lse.data(); })},
      {"out has strides of 0 a token and 8 a head: rows of 8 values overlap",
       with([](auto& t) { t.out.token_stride = 0; })},
      {"out has strides of 16 a token and 7 a head", with([](auto& t) { t.out.head_stride = 7; })},
      {"out has strides of 15 a token and 8 a head",
       with([](auto& t) { t.out.token_stride = 15; })},
      {"out has strides of 8 a token and 39 a head", with([](auto& t) {
         t.out.token_stride = 8;
         t.out.head_stride = 39;
       })},
      {"out has strides of -16 a token", with([](auto& t) { t.out.token_stride = -16; })},
      {"layer is 1", with([](auto& t) { t.layer = 1; })},
  };
  Fixture fixture;
  fixture.create();
  fixture.backend->plan(fixture.batch);
  fixture.backend->forward(good);
  fixture.backend->forward(with([](auto& t) {  // head by head
    t.out.token_stride = 8;
    t.out.head_stride = 5 * 8;
  }));
  for (const auto& [words, layer] : wrong) {
    expect_invalid(words, [&] { fixture.backend->forward(layer); });
  }
  fixture.batch.out_slots = nullptr;
  fixture.backend->plan(fixture.batch);
  expect_invalid("out_slots is null", [&] { fixture.backend->forward(good); });
  fixture.backend->forward(with([](auto& t) { t.save_kv = false; }));
}

// Widths of 1 are widths.
TEST(Forward, RefusesLatentTensorsThatDoNotFit) {
  std::vector<float> values(5 * 2 * 8);
  const auto rows = [&](int32_t heads, int32_t dim) {
    return dense_rows(values.data(), DType::f32, heads, dim);
  };
  LayerTensors good{.q = rows(2, 1), .q_rope = rows(2, 2), .k = rows(1, 6), .v = rows(1, 2)};
  good.out = rows(2, 1);
  good.mla_weights = {.w_uk = values.data(), .w_uv = values.data()};
  Fixture fixture;
  fixture.spec = {.kind = AttentionKind::mla, .q_heads = 2, .kv_heads = 1, .head_dim = 8};
  fixture.spec.head_dim_v = fixture.spec.kv_lora_rank = fixture.cache.head_dim_v = 6;
  fixture.spec.rope_dim = 2;
  fixture.spec.nope_dim = fixture.spec.v_dim = 1;
  fixture.cache.layout = KvLayout::mla;
  fixture.create();
  fixture.backend->plan(fixture.batch);
  fixture.backend->forward(good);
  const std::vector<std::pair<const char*, std::function<void(LayerTensors&)>>> wrong = {
      {"q_rope is fp16", [](auto& t) { t.q_rope.dtype = DType::f16; }},
      {"v is null", [](auto& t) { t.v = {}; }},
      {"mla_weights are null, but the spec's nope_dim is 1", [](auto& t) { t.mla_weights = {}; }},
      {"mla_weights are half given", [](auto& t) { t.mla_weights.w_uk = nullptr; }},
      {"mla_weights are half given", [](auto& t) { t.mla_weights.w_uv = nullptr; }},
      {"rows of 1 values overlap", [](auto& t) { t.out.head_stride = 0; }},
  };
  for (const auto& [words, change] : wrong) {
    LayerTensors layer = good;
    change(layer);
    expect_invalid(words, [&] { fixture.backend->forward(layer); });
  }
}

TEST(Forward, LatentsWithoutARotaryKeyNeedNoV) {
  std::vector<float> values(5 * 2 * 8);
  const HeadRows two = dense_rows(values.data(), DType::f32, 2, 8);
  const HeadRows one = dense_rows(values.data(), DType::f32, 1, 8);
  Fixture fixture;
  fixture.spec.kind = AttentionKind::mla;
  fixture.spec.kv_lora_rank = 8;
  fixture.spec.softmax_scale = 1;
  fixture.cache.layout = KvLayout::mla;
  fixture.create();
  fixture.backend->plan(fixture.batch);
  fixture.backend->forward({.q = two, .k = one, .out = two});
}

TEST(Forward, RefusesPackedBatchesWithoutKeys) {
  std::vector<float> values(5 * 2 * 8);
  const HeadRows two = dense_rows(values.data(), DType::f32, 2, 8);
  const HeadRows one = dense_rows(values.data(), DType::f32, 1, 8);
  Fixture fixture;
  fixture.spec.scope = AttentionScope::ragged;
  fixture.kv_lens = {2, 3};
  fixture.batch.out_slots = nullptr;  // nothing is stored
  fixture.create();
  fixture.backend->plan(fixture.batch);
  fixture.backend->forward({.q = two, .k = one, .v = one, .out = two});
  expect_invalid("k is null", [&] { fixture.backend->forward({.q = two, .out = two}); });
}

TEST(Forward, RefusesLinearTensorsThatDoNotFit) {
  const StateCacheSpec states{
      .layers = 1, .conv_dim = 12, .conv_width = 2, .heads = 1, .rows = 4, .columns = 4};
  AttentionSpec spec{.kind = AttentionKind::gated_delta_net,
                     .q_heads = 1,
                     .kv_heads = 1,
                     .head_dim = 4,
                     .head_dim_v = 4};
  spec.conv_width = 2;
  const auto pool = make_state_pool(states, 2);
  ThreadPool threads(1);
  const BackendRegistry registry = BackendRegistry::builtin();
  const auto backend =
      registry.find("linear")->create({.spec = spec, .state = pool.get(), .threads = &threads});
  backend->reserve({.max_requests = 1, .max_tokens = 2, .max_q_len = 2, .max_kv_len = 2});
  const int32_t q_indptr[] = {0, 2}, kv_len = 2, slot = 1;
  BatchView batch{.mode = ForwardMode::extend, .requests = 1, .tokens = 2, .q_indptr = q_indptr};
  batch.kv_lens = &kv_len;
  batch.state_slots = &slot;
  backend->plan(batch);
  std::vector<float> values(32);
  LayerTensors good{.out = dense_rows(values.data(), DType::f32, 1, 4)};
  good.linear.mixed = good.linear.conv_weight = values.data();
  good.linear.log_decay = good.linear.beta = values.data();
  backend->forward(good);
  const std::vector<std::pair<const char*, std::function<void(LayerTensors&)>>> wrong = {
      {"linear.mixed is null", [](auto& t) { t.linear.mixed = nullptr; }},
      {"linear.log_decay is null", [](auto& t) { t.linear.log_decay = nullptr; }},
      {"linear.beta is null", [](auto& t) { t.linear.beta = nullptr; }},
      {"linear.conv_weight is null, but the spec's conv_width is 2",
       [](auto& t) { t.linear.conv_weight = nullptr; }},
      {"linear.skip is given, but the spec's kind is gated_delta_net",
       [&](auto& t) { t.linear.skip = values.data(); }},
      {"out is null", [](auto& t) { t.out.data = nullptr; }},
      {"out is bf16", [](auto& t) { t.out.dtype = DType::bf16; }},
      {"out is fp32 with a head stride of 5, must be f32 with a head stride of head_dim_v = 4",
       [](auto& t) { t.out.head_stride = 5; }},
      {"out has strides of 3 a token and 4 a head: rows of 4 values overlap",
       [](auto& t) { t.out.token_stride = 3; }},
      {"q is given, but the spec's kind", [](auto& t) { t.q = t.out; }},
      {"q_rope is given, but the spec's kind", [](auto& t) { t.q_rope = t.out; }},
      {"q_succ is given, but the spec's kind", [](auto& t) { t.q_succ = t.out; }},
      {"q_inter is given, but the spec's kind", [](auto& t) { t.q_inter = t.out; }},
      {"k is given, but the spec's kind", [](auto& t) { t.k = t.out; }},
      {"v is given, but the spec's kind", [](auto& t) { t.v = t.out; }},
      {"lse is given, but the spec's kind", [&](auto& t) { t.lse = NaturalLse(values.data()); }},
  };
  for (const auto& [words, change] : wrong) {
    LayerTensors layer = good;
    change(layer);
    expect_invalid(words, [&] { backend->forward(layer); });
  }
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
  fill.kv_lens = nullptr;
  fill.encoder_lens = fixture.encoder_lens.data();
  const std::vector<int64_t> out_slots(fixture.slots.begin() + kContext,
                                       fixture.slots.begin() + kContext + 3);
  fill.out_slots = out_slots.data();
  std::vector<float> k(3 * 8, 0), v(3 * 8), q(5 * 2 * 8, 1), out(5 * 2 * 8, -1);
  for (size_t i = 0; i < v.size(); ++i) v[i] = static_cast<float>(i / 8 + 1);
  fixture.backend->plan(fill);
  fixture.backend->forward(
      {.k = dense_rows(k.data(), DType::f32, 1, 8), .v = dense_rows(v.data(), DType::f32, 1, 8)});

  BatchView decode = fixture.batch;
  decode.encoder_lens = fixture.encoder_lens.data();
  decode.out_slots = nullptr;
  fixture.backend->plan(decode);
  fixture.backend->forward({.q = dense_rows(q.data(), DType::f32, 2, 8),
                            .out = dense_rows(out.data(), DType::f32, 2, 8)});
  // Equal scores: the mean of 1, 2 and 3. The second request has no encoder tokens.
  for (size_t i = 0; i < out.size(); ++i) EXPECT_FLOAT_EQ(out[i], i < 2 * 2 * 8 ? 2.0f : 0.0f);
}

TEST(Reserve, RefusesLimitsNobodyCanMean) {
  constexpr int32_t kMost = std::numeric_limits<int32_t>::max();
  Fixture fixture;
  fixture.create();
  EXPECT_THROW((void)fixture.backend->workspace_bytes({kMost, kMost, kMost, kMost, kMost}), Error);
  fixture.spec.q_heads = 1 << 22;
  expect_invalid("at most 16777216", [&] { fixture.create(); });
}

TEST(Reserve, NamesTheBytesAWorkspaceNeeds) {
  Fixture fixture;
  fixture.create();
  const size_t needed = fixture.backend->workspace_bytes(fixture.limits);
  EXPECT_EQ(reference_backend().workspace_bytes(
                {fixture.spec, fixture.cache, fixture.limits, {.cores = 1}}),
            needed);
  alignas(64) std::byte memory[4096];
  ASSERT_LE(needed + 1, sizeof(memory));
  fixture.backend->reserve(fixture.limits, {memory, needed});
  test::expect_error(ErrorCode::workspace_too_small, std::to_string(needed), [&] {
    fixture.backend->reserve(fixture.limits, {memory, needed - 1});
  });
  expect_invalid("aligned to 64", [&] {
    fixture.backend->reserve(fixture.limits, {memory + 1, needed});
  });
}

TEST(Create, RefusesPoolsThatDoNotFit) {
  ThreadPool threads(1);
  const Fixture fixture;
  const BackendEntry entry = reference_backend();
  KvCacheSpec wide = fixture.cache;
  wide.head_dim = 16;
  const auto pool = make_kv_pool(fixture.cache, kPages), other = make_kv_pool(wide, kPages);
  const auto refuses = [&](const char* words, KvPool* kv, ThreadPool* pool_of_threads) {
    expect_invalid(words, [&] { entry.create({fixture.spec, kv, nullptr, pool_of_threads}); });
  };
  refuses("kv is null", nullptr, &threads);
  refuses("cache head_dim is 16", other.get(), &threads);
  refuses("threads is null", pool.get(), nullptr);
}

// Nothing is divided by a width that is 0, whoever is asked first.
TEST(Create, RefusesSpecsNobodyCanMean) {
  ThreadPool threads(1);
  const Fixture fixture;
  const auto pool = make_kv_pool(fixture.cache, kPages);
  const BackendRegistry registry = BackendRegistry::builtin();
  for (const BackendEntry& entry : registry.entries()) {
    if (!entry.why_not_built.empty()) continue;
    SCOPED_TRACE(entry.name);
    const BackendRequest nothing = {.spec = {}, .device = {.cores = 1}};
    expect_invalid("q_heads is 0", [&] { entry.create({{}, pool.get(), nullptr, &threads}); });
    expect_invalid("q_heads is 0", [&] { (void)entry.reject(nothing); });
    expect_invalid("q_heads is 0", [&] { (void)entry.workspace_bytes(nothing); });
  }
}

}  // namespace
}  // namespace fovea
