// SPDX-License-Identifier: Apache-2.0
// Tables, allocators, pools and prefix caches of C give what those of C++ give.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "c/small_world.h"
#include "fovea/kv_cache.h"
#include "fovea/prefix_cache.h"

namespace fovea::test {
namespace {

TEST(StorageInC, RequestTable) {
  RequestTable expected(4, 8);
  fovea_request_table* table = nullptr;
  ASSERT_EQ(fovea_request_table_create(4, 8, &table), FOVEA_OK);
  for (int i = 0; i < 3; ++i) {
    int32_t row = 0;
    ASSERT_EQ(fovea_request_table_allocate(table, &row), FOVEA_OK);
    EXPECT_EQ(row, *expected.allocate());
  }
  int32_t row = 5, available = -1, first = -1, *slots = nullptr;
  EXPECT_EQ(fovea_request_table_allocate(table, &row), FOVEA_FULL);
  EXPECT_EQ(row, -1);
  EXPECT_EQ(fovea_request_table_available(table, &available), FOVEA_OK);
  EXPECT_EQ(available, 0);
  ASSERT_EQ(fovea_request_table_row(table, 2, &slots), FOVEA_OK);
  slots[3] = 77;
  ASSERT_EQ(fovea_request_table_mark_changed(table, 2, 3), FOVEA_OK);
  ASSERT_EQ(fovea_request_table_take_changed(table, 2, &first), FOVEA_OK);
  EXPECT_EQ(first, 3);
  fovea_tensor view;
  ASSERT_EQ(fovea_request_table_view(table, &view), FOVEA_OK);
  EXPECT_EQ(view.shape[0], 4);
  EXPECT_EQ(view.shape[1], 8);
  EXPECT_EQ(static_cast<const int32_t*>(view.view.data)[2 * 8 + 3], 77);
  EXPECT_EQ(fovea_request_table_release(table, 2), FOVEA_OK);
  EXPECT_EQ(slots[3], 0);
  EXPECT_EQ(fovea_request_table_destroy(table), FOVEA_OK);
}

// Random extends and truncates, longer than the pieces in which the C interface takes slots.
TEST(StorageInC, PageAllocator) {
  PageAllocator expected(1000, 16);
  fovea_page_allocator* allocator = nullptr;
  ASSERT_EQ(fovea_page_allocator_create(1000, 16, &allocator), FOVEA_OK);
  std::vector<int64_t> slots(20000), wanted;
  int32_t length = 0;
  for (const int32_t next : {5, 16, 17, 4200, 4096, 12900, 100, 15984, 15985}) {
    if (next < length) {
      std::vector<int32_t> row(wanted.begin(), wanted.end());
      expected.truncate(row, next);
      wanted.resize(static_cast<size_t>(next));
      ASSERT_EQ(fovea_page_allocator_truncate(allocator, row.data(), row.size(), next), FOVEA_OK);
    } else {
      const int64_t last = length > 0 ? wanted.back() : -1;
      const bool fits = expected.extend(length, next, last, wanted);
      EXPECT_EQ(fovea_page_allocator_extend(allocator, length, next, last, slots.data() + length),
                fits ? FOVEA_OK : FOVEA_FULL);
      if (!fits) continue;
      EXPECT_TRUE(std::equal(wanted.begin(), wanted.end(), slots.begin())) << next;
    }
    length = next;
    int64_t free_pages = 0;
    ASSERT_EQ(fovea_page_allocator_free_pages(allocator, &free_pages), FOVEA_OK);
    EXPECT_EQ(free_pages, expected.free_pages());
  }
  EXPECT_NE(std::string(fovea_last_error()).find("1 pages wanted, 0 are free"), std::string::npos)
      << fovea_last_error();
  int32_t owners = 0;
  EXPECT_EQ(fovea_page_allocator_retain(allocator, 7), FOVEA_OK);
  EXPECT_EQ(fovea_page_allocator_references(allocator, 7, &owners), FOVEA_OK);
  EXPECT_EQ(owners, 2);
  EXPECT_EQ(fovea_page_allocator_release(allocator, 7), FOVEA_OK);
  std::vector<int32_t> row(slots.begin(), slots.begin() + length);
  EXPECT_EQ(fovea_page_allocator_release_slots(allocator, row.data(), row.size()), FOVEA_OK);
  std::vector<int64_t> pages(999);
  EXPECT_EQ(fovea_page_allocator_allocate(allocator, 1000, pages.data()), FOVEA_FULL);
  EXPECT_EQ(fovea_page_allocator_allocate(allocator, 999, pages.data()), FOVEA_OK);
  std::ranges::sort(pages);
  EXPECT_EQ(std::ranges::adjacent_find(pages), pages.end());
  EXPECT_EQ(fovea_page_allocator_destroy(allocator), FOVEA_OK);
}

TEST(StorageInC, PoolsReportTheirMemory) {
  SmallWorld world;
  const KvCacheSpec spec{.layers = 2,
                         .kv_heads = kWorldKvHeads,
                         .head_dim = kWorldDim,
                         .head_dim_v = kWorldDim,
                         .page_size = kWorldPageSize};
  size_t bytes = 0;
  ASSERT_EQ(fovea_kv_pool_bytes(&world.cache, kWorldPages, 0, &bytes), FOVEA_OK);
  EXPECT_EQ(bytes, kv_pool_bytes(spec, kWorldPages));
  const KvLayerView expected = make_kv_pool(spec, kWorldPages)->layer(1);
  fovea_kv_layer_view view;
  ASSERT_EQ(fovea_kv_layer_view_init(&view, sizeof view), FOVEA_OK);
  ASSERT_EQ(fovea_kv_pool_layer(world.pool, 1, &view), FOVEA_OK);
  EXPECT_EQ(view.slots, expected.slots);
  EXPECT_EQ(view.k_page_stride, expected.k_page_stride);
  EXPECT_EQ(view.v_token_stride, expected.v_token_stride);
  EXPECT_EQ(view.k_head_stride, expected.k_head_stride);
  int64_t pages = 0;
  EXPECT_EQ(fovea_kv_pool_pages(world.pool, &pages), FOVEA_OK);
  EXPECT_EQ(pages, kWorldPages);
}

TEST(StorageInC, WindowPool) {
  SmallWorld world;
  int64_t slot = 0, free_pages = 0;
  int32_t tokens = 0;
  const int64_t slots[] = {4, 5, 6, 7, 8, 9, 10, 11, 12}, full_pages[] = {1, 2, 3};
  ASSERT_EQ(fovea_window_kv_pool_map(world.window_pool, slots, 9), FOVEA_OK);
  const int64_t more[] = {20, 24};
  EXPECT_EQ(fovea_window_kv_pool_map(world.window_pool, more, 2), FOVEA_FULL);
  ASSERT_EQ(fovea_window_kv_pool_slot(world.window_pool, 5, &slot), FOVEA_OK);
  EXPECT_EQ(slot % kWorldPageSize, 1);
  EXPECT_EQ(fovea_window_kv_pool_unmap(world.window_pool, slots, 4), FOVEA_OK);
  ASSERT_EQ(fovea_window_kv_pool_slot(world.window_pool, 5, &slot), FOVEA_OK);
  EXPECT_EQ(slot, -1);
  EXPECT_EQ(fovea_window_kv_pool_usable_prefix(world.window_pool, full_pages, 3, &tokens),
            FOVEA_OK);
  EXPECT_EQ(tokens, 0);
  EXPECT_EQ(fovea_window_kv_pool_unmap_pages(world.window_pool, full_pages, 3), FOVEA_OK);
  EXPECT_EQ(fovea_window_kv_pool_free_pages(world.window_pool, &free_pages), FOVEA_OK);
  EXPECT_EQ(free_pages, 3);
  EXPECT_EQ(fovea_window_kv_pool_publish(world.window_pool, nullptr), FOVEA_OK);
}

TEST(StorageInC, StatePool) {
  SmallWorld world;
  int32_t a = 0, b = 0, c = 0, d = 7, free_slots = 0, in_use = 0;
  ASSERT_EQ(fovea_state_pool_allocate(world.states, &a), FOVEA_OK);
  ASSERT_EQ(fovea_state_pool_allocate(world.states, &b), FOVEA_OK);
  ASSERT_EQ(fovea_state_pool_allocate(world.states, &c), FOVEA_OK);
  EXPECT_EQ(fovea_state_pool_allocate(world.states, &d), FOVEA_FULL);
  EXPECT_EQ(d, -1);
  fovea_state_layer_view view;
  ASSERT_EQ(fovea_state_layer_view_init(&view, sizeof view), FOVEA_OK);
  ASSERT_EQ(fovea_state_pool_layer(world.states, 0, &view), FOVEA_OK);
  float* const state = static_cast<float*>(view.state);
  state[a * view.state_slot_stride + 5] = 3;
  view.conv[a * view.conv_slot_stride + 5] = 4;
  ASSERT_EQ(fovea_state_pool_copy(world.states, a, b), FOVEA_OK);
  EXPECT_EQ(fovea_state_pool_publish(world.states, nullptr), FOVEA_OK);
  EXPECT_EQ(state[b * view.state_slot_stride + 5], 3);
  EXPECT_EQ(view.conv[b * view.conv_slot_stride + 5], 4);
  EXPECT_EQ(fovea_state_pool_release(world.states, a), FOVEA_OK);
  EXPECT_EQ(fovea_state_pool_in_use(world.states, a, &in_use), FOVEA_OK);
  EXPECT_EQ(in_use, 0);
  EXPECT_EQ(fovea_state_pool_free_slots(world.states, &free_slots), FOVEA_OK);
  EXPECT_EQ(free_slots, 1);
}

TEST(StorageInC, PrefixCache) {
  SmallWorld world;
  std::vector<int64_t> pages(3), found(3), freed(3);
  const std::vector<int32_t> tokens = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12};
  ASSERT_EQ(fovea_page_allocator_allocate(world.allocator, 3, pages.data()), FOVEA_OK);
  fovea_prefix prefix;
  ASSERT_EQ(fovea_prefix_init(&prefix, sizeof prefix), FOVEA_OK);
  prefix.salt = "tenant";
  prefix.tokens = tokens.data();
  prefix.token_count = tokens.size();
  ASSERT_EQ(fovea_prefix_cache_insert(world.prefix_cache, &prefix, pages.data(), 3, -1), FOVEA_OK)
      << fovea_last_error();
  fovea_prefix_match match;
  ASSERT_EQ(fovea_prefix_match_init(&match, sizeof match), FOVEA_OK);
  match.pages = found.data();
  match.page_capacity = found.size();
  ASSERT_EQ(fovea_prefix_cache_match(world.prefix_cache, &prefix, 11, &match), FOVEA_OK);
  EXPECT_EQ(match.tokens, 8);
  EXPECT_EQ(match.state_slot, -1);
  EXPECT_EQ(found[0], pages[0]);
  EXPECT_EQ(found[1], pages[1]);
  for (int i = 0; i < 2; ++i) EXPECT_EQ(fovea_page_allocator_release(world.allocator, found[i]), 0);
  fovea_prefix other = prefix;
  other.salt = "another";
  ASSERT_EQ(fovea_prefix_cache_match(world.prefix_cache, &other, 11, &match), FOVEA_OK);
  EXPECT_EQ(match.tokens, 0);

  int32_t pinned = 0, evicted = 1;
  ASSERT_EQ(fovea_prefix_cache_pin(world.prefix_cache, &prefix, &pinned), FOVEA_OK);
  EXPECT_EQ(pinned, 12);
  for (const int64_t page : pages)
    EXPECT_EQ(fovea_page_allocator_release(world.allocator, page), 0);
  size_t count = 9;
  ASSERT_EQ(fovea_prefix_cache_evict(world.prefix_cache, 3, freed.data(), &count), FOVEA_OK);
  EXPECT_EQ(count, 0u);
  ASSERT_EQ(fovea_prefix_cache_unpin(world.prefix_cache, &prefix), FOVEA_OK);
  EXPECT_EQ(fovea_prefix_cache_unpin(world.prefix_cache, &prefix), FOVEA_INVALID_ARGUMENT);
  ASSERT_EQ(fovea_prefix_cache_evict(world.prefix_cache, 1, freed.data(), &count), FOVEA_OK);
  ASSERT_EQ(count, 1u);
  EXPECT_EQ(freed[0], pages[2]);
  EXPECT_EQ(fovea_prefix_cache_evict_state(world.prefix_cache, &evicted), FOVEA_OK);
  EXPECT_EQ(evicted, 0);
  count = 1;
  EXPECT_EQ(fovea_prefix_cache_clear(world.prefix_cache, freed.data(), &count),
            FOVEA_INVALID_ARGUMENT);
  count = freed.size();
  ASSERT_EQ(fovea_prefix_cache_clear(world.prefix_cache, freed.data(), &count), FOVEA_OK);
  EXPECT_EQ(count, 2u);
  fovea_prefix_cache_stats stats;
  ASSERT_EQ(fovea_prefix_cache_stats_init(&stats, sizeof stats), FOVEA_OK);
  ASSERT_EQ(fovea_prefix_cache_get_stats(world.prefix_cache, &stats), FOVEA_OK);
  EXPECT_EQ(stats.hits, 8);
  EXPECT_EQ(stats.pages, 0);
  EXPECT_EQ(stats.evicted_pages, 3);
}

// A backend of the world's layers over memory of the test, [layers, K or V, pages, page_size,
// kv_heads, dim].
class LentBackend {
 public:
  LentBackend(const SmallWorld& world, int32_t reserves_page_zero) : memory_(4 * kHalf) {
    const int64_t shape[] = {kWorldPages, kWorldPageSize, kWorldKvHeads, kWorldDim};
    fovea_tensor views[4];
    for (int i = 0; i < 4; ++i) {
      float* const data = memory_.data() + i * kHalf;
      EXPECT_EQ(fovea_tensor_init(&views[i], data, FOVEA_F32, world.cpu, shape, 4), FOVEA_OK);
    }
    const fovea_kv_memory layers[] = {{.k = &views[0].view, .v = &views[1].view},
                                      {.k = &views[2].view, .v = &views[3].view}};
    fovea_lent_pool lent;
    EXPECT_EQ(fovea_lent_pool_init(&lent, sizeof lent), FOVEA_OK);
    EXPECT_EQ(lent.reserves_page_zero, 1);
    lent.reserves_page_zero = reserves_page_zero;
    lent.spec = &world.cache;
    lent.layers = layers;
    EXPECT_EQ(fovea_kv_pool_lend(&lent, &pool_), FOVEA_OK) << fovea_last_error();
    EXPECT_EQ(fovea_backend_create(world.selection, pool_, nullptr, world.threads, &backend_),
              FOVEA_OK)
        << fovea_last_error();
    EXPECT_EQ(fovea_backend_reserve(backend_, &world.limits, nullptr, 0), FOVEA_OK);
  }
  ~LentBackend() {
    fovea_backend_destroy(backend_);
    fovea_kv_pool_destroy(pool_);
  }
  LentBackend(const LentBackend&) = delete;
  LentBackend& operator=(const LentBackend&) = delete;

  fovea_status run(const SmallWorld& world) {
    const fovea_status status = fovea_backend_plan(backend_, &world.batch, nullptr);
    return status == FOVEA_OK ? fovea_backend_forward(backend_, &world.layer, nullptr) : status;
  }
  // Returns a value of K in layer 0 at a slot.
  float key(int64_t slot) const {
    return memory_[static_cast<size_t>(slot * kWorldKvHeads * kWorldDim + 1)];
  }

 private:
  static constexpr int64_t kHalf =
      int64_t{kWorldPages} * kWorldPageSize * kWorldKvHeads * kWorldDim;
  std::vector<float> memory_;
  fovea_kv_pool* pool_ = nullptr;
  fovea_backend* backend_ = nullptr;
};

TEST(StorageInC, LentMemoryHoldsTheKeys) {
  SmallWorld world;
  ASSERT_EQ(world.plan(), FOVEA_OK);
  ASSERT_EQ(world.forward(), FOVEA_OK);
  const std::vector<float> expected = world.output();
  LentBackend lent(world, 1), without_padding(world, 0);
  world.reset();
  ASSERT_EQ(lent.run(world), FOVEA_OK) << fovea_last_error();
  EXPECT_EQ(world.output(), expected);
  EXPECT_NE(lent.key(4), 0);
  EXPECT_EQ(lent.key(0), 0);

  // Request 1 has page 0 instead of page 3.
  const auto move = [&] {
    world.reset();
    const int64_t slots[] = {4, 5, 6, 0, 1};
    const int32_t table[] = {1, 2, 3, 4, 0, 5, 6, 7};
    std::memcpy(world.out_slots.data, slots, sizeof slots);
    std::memcpy(world.slots.data, table, sizeof table);
  };
  move();
  EXPECT_EQ(lent.run(world), FOVEA_INVALID_ARGUMENT);
  move();
  ASSERT_EQ(without_padding.run(world), FOVEA_OK) << fovea_last_error();
  EXPECT_EQ(world.output(), expected);
  EXPECT_NE(without_padding.key(0), 0);
}

// The handles of a pool and of threads may go before the backend that uses them.
TEST(StorageInC, HandlesMayBeDestroyedInAnyOrder) {
  SmallWorld world;
  ASSERT_EQ(world.plan(), FOVEA_OK);
  ASSERT_EQ(world.forward(), FOVEA_OK);
  const std::vector<float> expected = world.output();
  EXPECT_EQ(fovea_kv_pool_destroy(world.pool), FOVEA_OK);
  EXPECT_EQ(fovea_thread_pool_destroy(world.threads), FOVEA_OK);
  EXPECT_EQ(fovea_selection_destroy(world.selection), FOVEA_OK);
  EXPECT_EQ(fovea_page_allocator_destroy(world.allocator), FOVEA_OK);
  world.pool = nullptr;
  world.threads = nullptr;
  world.selection = nullptr;
  world.allocator = nullptr;
  world.reset();
  ASSERT_EQ(world.plan(), FOVEA_OK);
  ASSERT_EQ(world.forward(), FOVEA_OK);
  EXPECT_EQ(world.output(), expected);
}

}  // namespace
}  // namespace fovea::test
