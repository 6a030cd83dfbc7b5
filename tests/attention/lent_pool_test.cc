// SPDX-License-Identifier: Apache-2.0
// Pools that callers implement over memory of their own: what contradicts itself is named when a
// backend is created, before anything is read.
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "attention/two_requests.h"
#include "fovea/select_backend.h"

namespace fovea {
namespace {

// The library's pool with views that somebody spoiled.
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
      {"k_page_stride is 0, there are 12 pages", [](auto& view) { view.k_page_stride = 0; }},
      {"k_token_stride is 0, there are 4 tokens", [](auto& view) { view.k_token_stride = 0; }},
      {"k_head_stride is 0, there are 2 heads", [](auto& view) { view.k_head_stride = 0; }},
      {"v_page_stride is 0", [](auto& view) { view.v_page_stride = 0; }},
      {"v_token_stride is 0", [](auto& view) { view.v_token_stride = 0; }},
      {"v_head_stride is 0", [](auto& view) { view.v_head_stride = 0; }},
  };
  for (const auto& [what, change] : spoilers) {
    pool.change_ = change;
    test::expect_invalid(what, create);
  }
  pool.change_ = nullptr;
  pool.pages_ = 1;
  test::expect_invalid("the pool has 1 pages", create);
}

}  // namespace
}  // namespace fovea
