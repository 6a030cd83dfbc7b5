// SPDX-License-Identifier: Apache-2.0
// Pools of lent memory that have no page for padding.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "attention/two_requests.h"
#include "fovea/select_backend.h"

namespace fovea {
namespace {

// A caller's pool whose page 0 is a page like any other.
class PageZeroPool final : public KvPool {
 public:
  explicit PageZeroPool(const KvCacheSpec& spec) : pool_(make_kv_pool(spec, test::kPages)) {}
  const KvCacheSpec& spec() const override { return pool_->spec(); }
  int64_t pages() const override { return pages_; }
  bool reserves_page_zero() const override { return false; }
  KvLayerView layer(int32_t index) const override {
    KvLayerView view = pool_->layer(index);
    view.slots = pages_ * test::kPage;
    return view;
  }

  int64_t pages_ = test::kPages;

 private:
  std::unique_ptr<KvPool> pool_;
};

// Moves the requests of the fixture one page to the front: the first has pages 0, 1 and 2.
void move_to_page_zero(test::TwoRequests& fixture) {
  for (int32_t row = 1; row < 3; ++row) {
    for (int32_t token = 0; token < 16; ++token) {
      fixture.slots[row * test::kContext + token] -= test::kPage;
    }
  }
  for (int64_t& slot : fixture.out_slots) slot -= test::kPage;
}

TEST(PageZero, BelongsToRequestsIfItIsNotReserved) {
  for (const bool by_row_zero : {false, true}) {
    for (const BackendEntry& entry : {reference_backend(), cpu_backend()}) {
      SCOPED_TRACE(entry.name);
      std::vector<std::vector<float>> results;
      for (const bool moved : {false, true}) {
        test::TwoRequests fixture;
        fixture.kv_lens = {2, 3};  // every token is new, so that the cache holds what was stored
        fixture.batch.positions = {};
        const auto first = fixture.slots.begin() + test::kContext;
        for (int32_t token = 0; token < 5; ++token) {
          fixture.out_slots[token] = token < 2 ? first[token] : first[test::kContext + token - 2];
        }
        if (moved) move_to_page_zero(fixture);
        if (moved && by_row_zero) {  // row 0 is no dummy either
          std::copy_n(first, test::kContext, fixture.slots.begin());
          fixture.rows[0] = 0;
        }
        PageZeroPool lent(fixture.cache);
        const auto owned = make_kv_pool(fixture.cache, test::kPages);
        KvPool* pool = moved ? static_cast<KvPool*>(&lent) : owned.get();
        const auto backend = entry.create({fixture.spec, pool, nullptr, &fixture.threads});
        backend->reserve(fixture.limits);
        backend->plan(fixture.batch);
        std::vector<float> q(5 * 2 * 8), k(5 * 8), v(5 * 8), out(5 * 2 * 8);
        for (size_t i = 0; i < q.size(); ++i) q[i] = static_cast<float>(i % 7) - 3;
        for (size_t i = 0; i < k.size(); ++i) k[i] = static_cast<float>(i % 5) - 2;
        for (size_t i = 0; i < v.size(); ++i) v[i] = static_cast<float>(i);
        backend->forward({.q = dense_rows(q.data(), DType::f32, 2, 8),
                          .k = dense_rows(k.data(), DType::f32, 1, 8),
                          .v = dense_rows(v.data(), DType::f32, 1, 8),
                          .out = dense_rows(out.data(), DType::f32, 2, 8)});
        results.push_back(out);
      }
      EXPECT_EQ(results[0], results[1]);
    }
  }
}

TEST(PageZero, IsCheckedLikeOthersIfItIsNotReserved) {
  test::TwoRequests fixture;
  move_to_page_zero(fixture);
  PageZeroPool pool(fixture.cache);
  const BackendEntry entry = reference_backend();
  const auto create = [&] {
    return entry.create({fixture.spec, &pool, nullptr, &fixture.threads});
  };
  pool.pages_ = 0;
  test::expect_invalid("the pool has 0 pages, must have at least 1", create);
  pool.pages_ = 1;
  EXPECT_NO_THROW(create());
  pool.pages_ = test::kPages;
  const auto backend = create();
  backend->reserve(fixture.limits);
  const auto plan = [&] { backend->plan(fixture.batch); };
  EXPECT_NO_THROW(plan());
  const std::vector<int64_t> right = fixture.out_slots;
  fixture.out_slots[0] = fixture.out_slots[1] = 3;
  test::expect_invalid("out_slots[1] is 3, which is out_slots[0]", plan);
  fixture.out_slots = right;
  fixture.kv_lens[0] = 0;
  test::expect_invalid("must be -1: its request is padding", plan);
  fixture.out_slots[0] = fixture.out_slots[1] = -1;
  fixture.batch.positions = {};
  EXPECT_NO_THROW(plan());
}

}  // namespace
}  // namespace fovea
