// SPDX-License-Identifier: Apache-2.0
// Pools that callers implement over memory of their own: contradictions are errors when a backend
// is created, before anything is read.
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "attention/two_requests.h"
#include "fovea/select_backend.h"

namespace fovea {
namespace {

// The library's pool with changed views.
class LentPool final : public KvPool {
 public:
  explicit LentPool(const KvCacheSpec& spec) : pool_(make_kv_pool(spec, test::kPages)) {}

  const KvCacheSpec& spec() const override { return pool_->spec(); }
  int64_t pages() const override { return pages_; }
  KvLayerView layer(int32_t index) const override {
    KvLayerView view = pool_->layer(index);
    if (change_) change_(view);
    return view;
  }

  int64_t pages_ = test::kPages;
  std::function<void(KvLayerView&)> change_;

 private:
  std::unique_ptr<KvPool> pool_;
};

TEST(LentPool, ViewsThatContradictTheSpecAreNamed) {
  const test::TwoRequests fixture;
  AttentionSpec spec = fixture.spec;
  KvCacheSpec cache = fixture.cache;
  spec.q_heads = spec.kv_heads = cache.kv_heads = 2;
  cache.dtype = DType::f8e4m3;
  cache.scale = KvScale::per_head;
  LentPool pool(cache);
  ThreadPool threads(1);
  const BackendRegistry registry = BackendRegistry::builtin();
  const BackendEntry& entry = *registry.find("reference");
  const auto create = [&] { entry.create({spec, &pool, nullptr, &threads}); };
  EXPECT_NO_THROW(create());
  const std::vector<std::pair<const char*, std::function<void(KvLayerView&)>>> spoilers = {
      {"layer 0 of the pool: layout is mla, its spec has mha",
       [](auto& view) { view.layout = KvLayout::mla; }},
      {"dtype is bf16, its spec has fp8_e4m3", [](auto& view) { view.dtype = DType::bf16; }},
      {"scale is none, its spec has per_head", [](auto& view) { view.scale = KvScale::none; }},
      {"page_size is 1, its spec has 4", [](auto& view) { view.page_size = 1; }},
      {"slots is 7, must be 12 pages of 4", [](auto& view) { view.slots = 7; }},
      {"k is null", [](auto& view) { view.k = nullptr; }},
      {"v is null", [](auto& view) { view.v = nullptr; }},
      {"k_scale is null, scale is per_head", [](auto& view) { view.k_scale = nullptr; }},
      {"v_scale is null", [](auto& view) { view.v_scale = nullptr; }},
      {"k_page_stride is 0 for 12 pages", [](auto& view) { view.k_page_stride = 0; }},
      {"k_token_stride 0 for 4 tokens", [](auto& view) { view.k_token_stride = 0; }},
      {"k_head_stride 0 for 2 heads", [](auto& view) { view.k_head_stride = 0; }},
      {"v_page_stride is 0", [](auto& view) { view.v_page_stride = 0; }},
      {"v_token_stride 0", [](auto& view) { view.v_token_stride = 0; }},
      {"v_head_stride 0", [](auto& view) { view.v_head_stride = 0; }},
  };
  for (const auto& [what, change] : spoilers) {
    pool.change_ = change;
    test::expect_invalid(what, create);
  }
  pool.change_ = nullptr;
  pool.pages_ = 1;
  test::expect_invalid("the pool has 1 pages", create);
  pool.pages_ = int64_t{1} << 61;
  test::expect_invalid("at most 536870911 with a page_size of 4", create);
}

// A pool and a change to the views of its layers. The words name the argument.
struct Spoiled {
  KvCacheSpec cache;
  AttentionSpec spec;
  std::vector<std::pair<const char*, std::function<void(KvLayerView&)>>> changes;
};

void expect_refused(const Spoiled& spoiled) {
  LentPool pool(spoiled.cache);
  ThreadPool threads(1);
  const BackendRegistry registry = BackendRegistry::builtin();
  const auto create = [&] {
    registry.find("reference")->create({spoiled.spec, &pool, nullptr, &threads});
  };
  EXPECT_NO_THROW(create());
  for (const auto& [words, change] : spoiled.changes) {
    SCOPED_TRACE(words);
    pool.change_ = change;
    test::expect_invalid(words, create);
  }
}

constexpr int64_t kFar = std::numeric_limits<int64_t>::max();

// 12 pages of 4 tokens and 2 heads of 8 floats: page, token and head strides of 64, 16 and 8.
TEST(LentPool, RowsThatOverlapAreNamed) {
  const test::TwoRequests fixture;
  Spoiled spoiled{fixture.cache, fixture.spec, {}};
  spoiled.spec.q_heads = spoiled.spec.kv_heads = spoiled.cache.kv_heads = 2;
  spoiled.cache.layers = 2;
  spoiled.changes = {
      {"layer 0 of the pool: k_page_stride is 63 for 12 pages, k_token_stride 16 for 4 tokens, "
       "k_head_stride 8 for 2 heads: rows of 8 elements overlap",
       [](auto& view) { view.k_page_stride = 63; }},
      {"k_token_stride 15 for", [](auto& view) { view.k_token_stride = 15; }},
      {"k_head_stride 7 for", [](auto& view) { view.k_head_stride = 7; }},
      {"k_head_stride 17 for", [](auto& view) { view.k_head_stride = 17; }},
      {"k_page_stride is -64", [](auto& view) { view.k_page_stride = -64; }},
      {"k_token_stride -16", [](auto& view) { view.k_token_stride = -16; }},
      {"k_head_stride -8", [](auto& view) { view.k_head_stride = -8; }},
      {"v_page_stride is 63", [](auto& view) { view.v_page_stride = 63; }},
      {"v_token_stride 15", [](auto& view) { view.v_token_stride = 15; }},
      {"v_head_stride -8", [](auto& view) { view.v_head_stride = -8; }},
      {"layer 0 of the pool: k at", [](auto& view) { view.k_page_stride = kFar; }},
      {"addresses exceed 63 bits", [](auto& view) { view.v_token_stride = kFar / 4; }},
      {"addresses exceed 63 bits",
       [](auto& view) { view.k_page_stride = std::numeric_limits<int64_t>::min(); }},
      {"layer 0 of the pool: v at", [](auto& view) { view.v = view.k; }},
      {"overlaps k at", [](auto& view) { view.v = view.k + 11 * 64 * sizeof(float); }},
      {"layer 0 of the pool: k is at", [](auto& view) { ++view.k; }},
      {"layer 0 of the pool: v is at", [](auto& view) { view.v += 2; }},
      {"must be aligned to 4 bytes", [](auto& view) { view.v += 2; }},
  };
  expect_refused(spoiled);
}

TEST(LentPool, RowsOf656BytesAreNotOf576) {
  Spoiled spoiled;
  spoiled.spec = {.kind = AttentionKind::mla, .q_heads = 2, .kv_heads = 1};
  spoiled.spec.mla = {.kv_lora_rank = 512, .rope_dim = 64};
  spoiled.spec.scores.softmax_scale = 0.1f;
  spoiled.cache = {.layout = KvLayout::mla_fp8_rows,
                   .dtype = DType::f8e4m3,
                   .layers = 1,
                   .kv_heads = 1,
                   .head_dim = 576,
                   .head_dim_v = 512,
                   .page_size = 4};
  spoiled.changes = {
      {"k_token_stride 576 for 4 tokens, k_head_stride 576 for 1 heads: rows of 656 elements "
       "overlap",
       [](auto& view) {
         view.k_page_stride = view.v_page_stride = 4 * 576;
         view.k_token_stride = view.v_token_stride = 576;
         view.k_head_stride = view.v_head_stride = 576;
       }},
      {"k_page_stride is 2623", [](auto& view) { view.k_page_stride = 4 * 656 - 1; }},
      {"k_token_stride is 657 bytes, must be a multiple of 4",
       [](auto& view) {
         view.k_page_stride = 4 * 657;
         view.k_token_stride = 657;
       }},
      {"k_page_stride is 2626 bytes, must be a multiple of 4",
       [](auto& view) { view.k_page_stride = 4 * 656 + 2; }},
      {"k is at", [](auto& view) { view.k = view.v = view.k + 2; }},
      {"must be k =", [](auto& view) { view.v += 656; }},
  };
  expect_refused(spoiled);
  spoiled.cache.layout = KvLayout::mla;
  spoiled.cache.dtype = DType::bf16;
  spoiled.changes = {
      {"rows of 576 elements overlap", [](auto& view) { view.k_token_stride = 512; }},
      {"must be k =", [](auto& view) { view.v += 2; }},
      {"k is at", [](auto& view) { view.k = view.v = view.k + 1; }},
  };
  expect_refused(spoiled);
}

TEST(LentPool, ScalesThatAreWrittenHaveMemoryOfTheirOwn) {
  const test::TwoRequests fixture;
  Spoiled spoiled{fixture.cache, fixture.spec, {}};
  spoiled.cache.dtype = DType::f8e4m3;
  spoiled.cache.scale = KvScale::per_token_head;
  const auto floats = [](char* at) { return reinterpret_cast<float*>(at); };
  spoiled.changes = {
      {"layer 0 of the pool: k_scale is at",
       [&](auto& view) { view.k_scale = floats(reinterpret_cast<char*>(view.k_scale) + 1); }},
      {"layer 0 of the pool: v_scale is at",
       [&](auto& view) { view.v_scale = floats(reinterpret_cast<char*>(view.v_scale) + 2); }},
      {"v_scale at", [](auto& view) { view.v_scale = view.k_scale; }},
      {"overlaps k_scale at", [](auto& view) { view.v_scale = view.k_scale + 1; }},
      {"k_scale at", [&](auto& view) { view.k_scale = floats(view.k); }},
      {"overlaps v at", [&](auto& view) { view.k_scale = floats(view.v); }},
  };
  expect_refused(spoiled);
}

// The distance of layers is too small. Identical layers are accepted.
TEST(LentPool, LayersThatOverlapAreNamed) {
  const test::TwoRequests fixture;
  Spoiled spoiled{fixture.cache, fixture.spec, {}};
  spoiled.cache.layers = 2;
  LentPool pool(spoiled.cache);
  const KvLayerView first = pool.layer(0);
  ThreadPool threads(1);
  const BackendRegistry registry = BackendRegistry::builtin();
  const auto create = [&] {
    registry.find("reference")->create({spoiled.spec, &pool, nullptr, &threads});
  };
  const auto move_second = [&](int64_t bytes) {
    pool.change_ = [=](KvLayerView& view) {
      if (view.k == first.k) return;
      view.k = first.k + bytes;
      view.v = first.v + bytes;
    };
  };
  move_second(32);
  test::expect_invalid("layer 1 of the pool: k at", create);
  move_second(11 * 4 * 32);
  test::expect_invalid("overlaps k of layer 0", create);
  move_second(0);
  EXPECT_NO_THROW(create());
}

// A lent pool of states.
class LentStates final : public StatePool {
 public:
  explicit LentStates(const StateCacheSpec& spec) : pool_(make_state_pool(spec, 3)) {}
  const StateCacheSpec& spec() const override { return pool_->spec(); }
  int32_t slots() const override { return 3; }
  bool in_use(int32_t slot) const override { return pool_->in_use(slot); }
  StateLayerView layer(int32_t index) const override {
    StateLayerView view = pool_->layer(index);
    if (change_) change_(view);
    return view;
  }
  int32_t free_slots() const override { return pool_->free_slots(); }
  std::optional<int32_t> allocate() override { return pool_->allocate(); }
  void release(int32_t slot) override { pool_->release(slot); }
  void copy(int32_t from, int32_t to) override { pool_->copy(from, to); }

  std::function<void(StateLayerView&)> change_;

 private:
  std::unique_ptr<StatePool> pool_;
};

TEST(LentPool, StatesThatOverlapAreNamed) {
  AttentionSpec spec{
      .kind = AttentionKind::gated_delta_net,
      .linear = {.key_heads = 1, .value_heads = 1, .key_dim = 4, .value_dim = 4, .conv_width = 2}};
  LentStates states(
      {.layers = 1, .conv_dim = 12, .conv_width = 2, .heads = 1, .rows = 4, .columns = 4});
  ThreadPool threads(1);
  const BackendRegistry registry = BackendRegistry::builtin();
  const auto create = [&] {
    registry.find("linear")->create({.spec = spec, .state = &states, .threads = &threads});
  };
  EXPECT_NO_THROW(create());
  const auto byte_on = [](void* at) {
    return reinterpret_cast<float*>(static_cast<char*>(at) + 1);
  };
  const std::vector<std::pair<const char*, std::function<void(StateLayerView&)>>> changes = {
      {"layer 0 of the state pool: slots is 2, the pool has 3", [](auto& v) { v.slots = 2; }},
      {"layer 0 of the state pool: state is null", [](auto& v) { v.state = nullptr; }},
      {"layer 0 of the state pool: conv is null", [](auto& v) { v.conv = nullptr; }},
      {"state is at", [&](auto& v) { v.state = byte_on(v.state); }},
      {"conv is at", [&](auto& v) { v.conv = byte_on(v.conv); }},
      {"state_slot_stride is 15, a slot has 16 values", [](auto& v) { v.state_slot_stride = 15; }},
      {"state_slot_stride is -16", [](auto& v) { v.state_slot_stride = -16; }},
      {"conv_slot_stride is 11, a slot has 12 values", [](auto& v) { v.conv_slot_stride = 11; }},
      {"addresses exceed 63 bits", [](auto& v) { v.conv_slot_stride = kFar; }},
      {"overlaps state at", [](StateLayerView& v) { v.conv = v.state_as<float>() + 4; }},
  };
  for (const auto& [words, change] : changes) {
    SCOPED_TRACE(words);
    states.change_ = change;
    test::expect_invalid(words, create);
  }
}

// A caller's window pool with a map that leads out of it.
class LentWindowPool final : public KvPool {
 public:
  explicit LentWindowPool(const KvCacheSpec& spec) : pool_(make_window_kv_pool(spec, 3, 48)) {
    map_.assign(pool_->slot_map().begin(), pool_->slot_map().end());
  }
  const KvCacheSpec& spec() const override { return pool_->spec(); }
  int64_t pages() const override { return pool_->pages(); }
  KvLayerView layer(int32_t index) const override { return pool_->layer(index); }
  std::span<const int64_t> slot_map() const override { return map_; }

  std::vector<int64_t> map_;

 private:
  std::unique_ptr<WindowKvPool> pool_;
};

TEST(LentPool, SlotMapsThatLeadOutOfThePoolAreNamed) {
  test::TwoRequests fixture;
  fixture.spec.window = fixture.cache.window = 4;
  LentWindowPool pool(fixture.cache);
  const auto create = [&] {
    fixture.backend = reference_backend().create({fixture.spec, &pool, nullptr, &fixture.threads});
  };
  pool.map_.push_back(-1);
  test::expect_invalid("slot_map of the pool has 49 slots, must be whole pages of 4", create);
  pool.map_.pop_back();
  create();
  fixture.backend->reserve(fixture.limits);
  const auto plan = [&] { fixture.backend->plan(fixture.batch); };
  for (const int64_t wild : {int64_t{-2}, int64_t{12}, kFar}) {
    pool.map_[11] = wild;
    test::expect_invalid("out_slots[0] is 11, which slot_map() of the pool puts in slot " +
                             std::to_string(wild) + " of [-1, 12)",
                         plan);
  }
}

}  // namespace
}  // namespace fovea
