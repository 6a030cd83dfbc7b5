// SPDX-License-Identifier: Apache-2.0
// What plan() and forward() refuse: every symptom has its message, and nothing wild is followed.
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "attention/backends/backends.h"
#include "fovea/error.h"

namespace fovea {
namespace {

constexpr int32_t kPage = 4, kPages = 12, kContext = 32;

// Two requests of 9 and 6 tokens, 2 and 3 of them new, and everything a batch may point to.
struct Fixture {
  AttentionSpec spec{.q_heads = 2, .kv_heads = 1, .head_dim = 8, .head_dim_v = 8};
  KvCacheSpec cache{.layers = 1, .kv_heads = 1, .head_dim = 8, .head_dim_v = 8, .page_size = kPage};
  BatchLimits limits{
      .max_requests = 2, .max_tokens = 5, .max_q_len = 3, .max_kv_len = 16, .max_encoder_len = 8};
  std::vector<int32_t> q_indptr = {0, 2, 5}, kv_lens = {9, 6}, rows = {1, 2};
  std::vector<int32_t> slots = std::vector<int32_t>(3 * kContext, 0);
  std::vector<int32_t> pages = slots;  // what `slots` says, by pages
  std::vector<int64_t> out_slots;
  std::vector<int32_t> positions = {7, 8, 3, 4, 5};
  std::vector<uint64_t> tree = {1, 3, 1, 3, 7};
  std::vector<uint8_t> custom = std::vector<uint8_t>(2 * 9 + 3 * 6, 1);
  std::vector<int64_t> custom_indptr = {0, 18, 36};
  std::vector<int32_t> spans = {0, 3}, span_indptr = {0, 1, 1};
  std::vector<uint32_t> prefix_lens = {4, 2};
  std::vector<uint16_t> in_items = std::vector<uint16_t>(2 * 5, 0);
  std::vector<int32_t> encoder_lens = {8, 0};
  BatchView batch;
  ThreadPool threads{1};
  std::unique_ptr<KvPool> pool;
  std::unique_ptr<AttentionBackend> backend;

  Fixture() {
    for (int32_t token = 0; token < 16; ++token) {
      slots[kContext + token] = (1 + token / kPage) * kPage + token % kPage;
      slots[2 * kContext + token] = (5 + token / kPage) * kPage + token % kPage;
      pages[kContext + token / kPage] = 1 + token / kPage;
      pages[2 * kContext + token / kPage] = 5 + token / kPage;
    }
    for (const int32_t token : {7, 8}) out_slots.push_back(slots[kContext + token]);
    for (const int32_t token : {3, 4, 5}) out_slots.push_back(slots[2 * kContext + token]);
    batch = {.mode = ForwardMode::extend,
             .requests = 2,
             .tokens = 5,
             .max_q_len = 3,
             .max_kv_len = 9,
             .q_indptr = q_indptr.data(),
             .kv_lens = kv_lens.data(),
             .request_rows = rows.data(),
             .request_slots = slots.data(),
             .request_slots_stride = kContext,
             .out_slots = out_slots.data(),
             .positions = positions.data(),
             .encoder_lens = encoder_lens.data(),
             .encoder_slots = slots.data(),
             .encoder_slots_stride = kContext,
             .tree_mask = tree.data(),
             .custom_mask = custom.data(),
             .custom_mask_indptr = custom_indptr.data(),
             .spans = spans.data(),
             .span_indptr = span_indptr.data(),
             .item_prefix_lens = prefix_lens.data(),
             .token_pos_in_items = in_items.data(),
             .token_pos_in_items_stride = 5};
  }

  void give_pages() {
    batch.request_slots = nullptr;
    batch.page_table = pages.data();
    batch.page_table_stride = kContext;
  }

  void create() {
    if (!is_packed(spec.scope)) pool = make_kv_pool(cache, kPages);
    backend = reference_backend().create({spec, pool.get(), nullptr, &threads});
    backend->reserve(limits);
  }
};

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument) << error.what();
    return error.what();
  }
  return "nothing was thrown";
}

struct Symptom {
  const char* words;  // the message holds them
  std::function<void(Fixture&)> cause;
};

void expect_symptoms(
    const std::vector<Symptom>& symptoms,
    const std::function<void(Fixture&)>& prepare = [](Fixture&) {}) {
  {
    Fixture healthy;
    prepare(healthy);
    healthy.create();
    healthy.backend->plan(healthy.batch);
  }
  for (const Symptom& symptom : symptoms) {
    Fixture fixture;
    prepare(fixture);
    fixture.create();
    symptom.cause(fixture);
    const std::string text = error_of([&] { fixture.backend->plan(fixture.batch); });
    EXPECT_NE(text.find(symptom.words), std::string::npos) << symptom.words << " / " << text;
    EXPECT_EQ(error_of([&] { fixture.backend->forward({}); }), "forward() without a plan");
  }
}

TEST(Plan, RefusesLengthsThatAreWrong) {
  expect_symptoms({
      {"requests is 3, must be in [0, 2]", [](auto& f) { f.batch.requests = 3; }},
      {"requests is -1", [](auto& f) { f.batch.requests = -1; }},
      {"tokens is 6, must be in [0, 5]", [](auto& f) { f.batch.tokens = 6; }},
      {"q_indptr is null", [](auto& f) { f.batch.q_indptr = nullptr; }},
      {"q_indptr[0] is 1", [](auto& f) { f.q_indptr[0] = 1; }},
      {"not monotone",
       [](auto& f) {
         f.q_indptr = {0, 3, 2};
       }},
      {"must be tokens = 5", [](auto& f) { f.q_indptr[2] = 4; }},
      {"request 1: q_len is 4, at most 3", [](auto& f) { f.q_indptr[1] = 1; }},
      {"mode decode takes 1", [](auto& f) { f.batch.mode = ForwardMode::decode; }},
      {"request 1: q_len is 3, mode target_verify",
       [](auto& f) { f.batch.mode = ForwardMode::target_verify; }},
      {"kv_lens is null", [](auto& f) { f.batch.kv_lens = nullptr; }},
      {"request 0: kv_len is 17, must be in [0, 16]", [](auto& f) { f.kv_lens[0] = 17; }},
      {"request 1: kv_len is -1", [](auto& f) { f.kv_lens[1] = -1; }},
      {"request 1: kv_len is 2, less than its 3 new tokens", [](auto& f) { f.kv_lens[1] = 2; }},
      {"row of request_slots has 8", [](auto& f) { f.batch.request_slots_stride = 8; }},
      {"row of page_table has 8",
       [](auto& f) {
         f.give_pages();
         f.batch.page_table_stride = 2;
       }},
  });
}

TEST(Plan, RefusesSlotsOutsideThePool) {
  expect_symptoms({
      {"request_slots and page_table are null", [](auto& f) { f.batch.request_slots = nullptr; }},
      {"request_slots and page_table are given",
       [](auto& f) { f.batch.page_table = f.pages.data(); }},
      {"request_slots_stride is 0", [](auto& f) { f.batch.request_slots_stride = 0; }},
      {"page_table_stride is -1",
       [](auto& f) {
         f.give_pages();
         f.batch.page_table_stride = -1;
       }},
      {"request 1, column 0: page 12 is outside [0, 12)",
       [](auto& f) {
         f.give_pages();
         f.pages[2 * kContext] = kPages;
       }},
      {"request_rows is null", [](auto& f) { f.batch.request_rows = nullptr; }},
      {"request_rows[1] is -2", [](auto& f) { f.rows[1] = -2; }},
      {"request 0, column 2", [](auto& f) { f.slots[kContext + 8] = kPages * kPage; }},
      {"outside the pool of 12 pages", [](auto& f) { f.slots[kContext + 8] = kPages * kPage; }},
      {"request 1, column 0", [](auto& f) { f.slots[2 * kContext + 3] = -1; }},
      {"request 0, column 1",
       [](auto& f) { f.slots[kContext + 7] = std::numeric_limits<int32_t>::min(); }},
      {"exceeds the pages it owns", [](auto& f) { f.slots[kContext + 8] = 0; }},
      {"out_slots[3] is 48, must be in [-1, 48)", [](auto& f) { f.out_slots[3] = 48; }},
      {"out_slots[0] is -2", [](auto& f) { f.out_slots[0] = -2; }},
      {"positions[4] is 6, must be in [0, 6)", [](auto& f) { f.positions[4] = 6; }},
      {"positions[0] is -1", [](auto& f) { f.positions[0] = -1; }},
  });
}

TEST(Plan, RefusesMasksThatDoNotFit) {
  expect_symptoms(
      {{"custom_mask is null", [](auto& f) { f.batch.custom_mask = nullptr; }},
       {"custom_mask_indptr is null", [](auto& f) { f.batch.custom_mask_indptr = nullptr; }},
       {"request 0: its custom mask has 17 bytes, q_len * kv_len = 2 * 9 needs 18",
        [](auto& f) { f.custom_indptr[1] = 17; }},
       {"custom_mask_indptr[0] is -1", [](auto& f) { f.custom_indptr[0] = -1; }}},
      [](Fixture& f) { f.spec.mask = MaskKind::custom; });
  expect_symptoms({{"span_indptr is null", [](auto& f) { f.batch.span_indptr = nullptr; }},
                   {"spans is null", [](auto& f) { f.batch.spans = nullptr; }},
                   {"span_indptr[2] is 0", [](auto& f) { f.span_indptr[2] = 0; }},
                   {"span [3, 0) is not a range",
                    [](auto& f) {
                      f.spans = {3, 0};
                      f.batch.spans = f.spans.data();
                    }}},
                  [](Fixture& f) { f.spec.mask = MaskKind::prefix_spans; });
  expect_symptoms(
      {{"item_prefix_lens is null", [](auto& f) { f.batch.item_prefix_lens = nullptr; }},
       {"token_pos_in_items is null", [](auto& f) { f.batch.token_pos_in_items = nullptr; }},
       {"request 0: 6 tokens after its prefix of 3", [](auto& f) { f.prefix_lens[0] = 3; }}},
      [](Fixture& f) { f.spec.mask = MaskKind::multi_item; });
  expect_symptoms({{"tree_mask is null",
                    [](auto& f) {
                      f.q_indptr = {0, 2, 4};
                      f.batch.q_indptr = f.q_indptr.data();
                      f.batch.tokens = 4;
                      f.batch.mode = ForwardMode::target_verify;
                      f.batch.tree_mask = nullptr;
                    }},
                   {"request 0: 65 new tokens, a tree mask covers 64",
                    [](auto& f) {
                      f.q_indptr = {0, 65};
                      f.kv_lens = {65};
                      f.batch.requests = 1;
                      f.batch.tokens = 65;
                      f.batch.q_indptr = f.q_indptr.data();
                      f.batch.kv_lens = f.kv_lens.data();
                      f.batch.out_slots = nullptr;
                      f.batch.positions = nullptr;
                      f.batch.request_slots_stride = 96;
                    }}},
                  [](Fixture& f) {
                    f.spec.mask = MaskKind::tree;
                    f.limits.max_tokens = f.limits.max_q_len = f.limits.max_kv_len = 70;
                  });
}

TEST(Plan, RefusesEncodersThatDoNotFit) {
  expect_symptoms(
      {{"encoder_lens is null", [](auto& f) { f.batch.encoder_lens = nullptr; }},
       {"encoder_slots and encoder_page_table are null",
        [](auto& f) { f.batch.encoder_slots = nullptr; }},
       {"encoder_slots and encoder_page_table are given",
        [](auto& f) { f.batch.encoder_page_table = f.pages.data(); }},
       {"encoder_slots_stride is 0", [](auto& f) { f.batch.encoder_slots_stride = 0; }},
       {"request 0: encoder_lens is 8, its row of encoder_page_table has 4",
        [](auto& f) {
          f.batch.encoder_slots = nullptr;
          f.batch.encoder_page_table = f.pages.data();
          f.batch.encoder_page_table_stride = 1;
        }},
       {"request 0: encoder_lens is 9, must be in [0, 8]", [](auto& f) { f.encoder_lens[0] = 9; }},
       {"request 1: encoder_lens is -1", [](auto& f) { f.encoder_lens[1] = -1; }}},
      [](Fixture& f) { f.spec.scope = AttentionScope::cross; });
}

// Check 6 for every array at once: whatever one entry becomes, the plan is refused or the pass runs
// inside its memory (the sanitizer build watches).
TEST(Plan, OneWildEntryIsAnErrorOrHarmless) {
  int refused = 0;
  RC_ASSERT(rc::check([&refused] {
    Fixture fixture;
    fixture.spec.mask = *rc::gen::element(MaskKind::none, MaskKind::tree, MaskKind::custom,
                                          MaskKind::prefix_spans, MaskKind::multi_item);
    fixture.spec.window = *rc::gen::element(0, 1, 4);
    fixture.create();
    const auto wild = *rc::gen::element<int32_t>(-1, -2, 0, 1, 2, 7, 48, 64, 1 << 20,
                                                 std::numeric_limits<int32_t>::min(),
                                                 std::numeric_limits<int32_t>::max());
    const auto damage = [&](auto& array) {
      using Entry = typename std::decay_t<decltype(array)>::value_type;
      array[*rc::gen::inRange<size_t>(0, array.size())] = static_cast<Entry>(wild);
    };
    switch (*rc::gen::inRange(0, 10)) {
      case 0:
        damage(fixture.q_indptr);
        break;
      case 1:
        damage(fixture.kv_lens);
        break;
      case 2:
        damage(fixture.slots);
        break;
      case 3:
        damage(fixture.out_slots);
        break;
      case 4:
        damage(fixture.positions);
        break;
      case 5:
        damage(fixture.custom_indptr);
        break;
      case 6:
        damage(fixture.spans);
        break;
      case 7:
        damage(fixture.prefix_lens);
        break;
      case 8:
        fixture.give_pages();
        damage(fixture.pages);
        break;
      default:
        damage(fixture.in_items);
    }
    std::vector<float> rows(5 * 2 * 8);
    const HeadRows q = dense_rows(rows.data(), DType::f32, 2, 8);
    const HeadRows k = dense_rows(rows.data(), DType::f32, 1, 8);
    try {
      fixture.backend->plan(fixture.batch);
    } catch (const Error&) {
      ++refused;
      return;
    }
    fixture.backend->forward({.q = q, .k = k, .v = k, .out = q});
  }));
  EXPECT_GT(refused, 0);
}

TEST(Plan, PagesBeforeTheWindowMayBeGone) {
  Fixture fixture;
  fixture.spec.window = 2;
  fixture.create();
  // Token 7 of request 0 sees 6 and 7: pages 1 and 2. Page 0 is somebody else's by now.
  for (int32_t token = 0; token < kPage; ++token) fixture.slots[kContext + token] = -1;
  fixture.backend->plan(fixture.batch);
  fixture.slots[kContext + 6] = -1;
  EXPECT_NE(error_of([&] { fixture.backend->plan(fixture.batch); }).find("request 0, column 1"),
            std::string::npos);
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
  const std::vector<std::pair<const char*, LayerTensors>> wrong = {
      {"v is null", with([](auto& t) { t.v = {}; })},
      {"out is null", with([](auto& t) { t.out = {}; })},
      {"q is null and there is no k", with([](auto& t) { t.q = t.k = {}; })},
      {"q is bf16, the spec's q_dtype asks for fp32",
       with([](auto& t) { t.q.dtype = DType::bf16; })},
      {"k is fp16", with([](auto& t) { t.k.dtype = DType::f16; })},
      {"needs_lse is false", with([&](auto& t) { t.lse = lse.data(); })},
      {"sinks is given", with([&](auto& t) { t.sinks = lse.data(); })},
      {"alibi_slopes is given", with([&](auto& t) { t.alibi_slopes = lse.data(); })},
      {"q_scale is given", with([&](auto& t) { t.q_scale = lse.data(); })},
      {"layer is 1", with([](auto& t) { t.layer = 1; })},
  };
  Fixture fixture;
  fixture.create();
  fixture.backend->plan(fixture.batch);
  fixture.backend->forward(good);
  for (const auto& [words, layer] : wrong) {
    const std::string text = error_of([&] { fixture.backend->forward(layer); });
    EXPECT_NE(text.find(words), std::string::npos) << words << " / " << text;
  }
  fixture.batch.out_slots = nullptr;
  fixture.backend->plan(fixture.batch);
  EXPECT_NE(error_of([&] { fixture.backend->forward(good); }).find("out_slots is null"),
            std::string::npos);
  fixture.backend->forward(with([](auto& t) { t.save_kv = false; }));
}

TEST(Forward, RefusesRotationsThatDoNotFit) {
  std::vector<float> rows(5 * 2 * 8), table(kContext * 4);
  const std::vector<int32_t> positions(5);
  const RotaryTensors good{.cos = table.data(),
                           .sin = table.data(),
                           .max_positions = kContext,
                           .rotary_dim = 8,
                           .positions = positions.data()};
  const std::vector<int32_t> beyond(5, kContext);
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
    const std::string text = error_of([&] { fixture.backend->forward(layer); });
    EXPECT_NE(text.find(words), std::string::npos) << words << " / " << text;
  }
  fixture.spec.has_rope = false;
  fixture.create();
  fixture.backend->plan(fixture.batch);
  layer.rotary = good;
  EXPECT_NE(error_of([&] { fixture.backend->forward(layer); }).find("rotary.cos is given"),
            std::string::npos);
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
  const int32_t q_indptr[] = {0, 3, 3}, no_keys[] = {0, 0};
  fixture.encoder_lens = {3, 0};
  BatchView fill = fixture.batch;
  fill.tokens = 3;
  fill.q_indptr = q_indptr;
  fill.kv_lens = no_keys;
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
  EXPECT_NE(error_of([&] { fixture.create(); }).find("at most 16777216"), std::string::npos);
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
  try {
    fixture.backend->reserve(fixture.limits, {memory, needed - 1});
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::workspace_too_small);
    EXPECT_NE(std::string(error.what()).find(std::to_string(needed)), std::string::npos);
  }
  EXPECT_NE(error_of([&] {
              fixture.backend->reserve(fixture.limits, {memory + 1, needed});
            }).find("aligned to 64"),
            std::string::npos);
}

TEST(Create, RefusesPoolsThatDoNotFit) {
  ThreadPool threads(1);
  const Fixture fixture;
  const BackendEntry entry = reference_backend();
  KvCacheSpec wide = fixture.cache;
  wide.head_dim = 16;
  const auto pool = make_kv_pool(fixture.cache, kPages), other = make_kv_pool(wide, kPages);
  const auto create = [&](KvPool* kv, ThreadPool* pool_of_threads) {
    return error_of([&] { entry.create({fixture.spec, kv, nullptr, pool_of_threads}); });
  };
  EXPECT_NE(create(nullptr, &threads).find("kv is null"), std::string::npos);
  EXPECT_NE(create(other.get(), &threads).find("cache head_dim is 16"), std::string::npos);
  EXPECT_NE(create(pool.get(), nullptr).find("threads is null"), std::string::npos);
}

}  // namespace
}  // namespace fovea
