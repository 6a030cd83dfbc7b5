// SPDX-License-Identifier: Apache-2.0
// Out of memory in public calls: an Error names the request, and nothing is lost.
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "attention/two_requests.h"
#include "fovea/merge_states.h"
#include "fovea/prefix_cache.h"
#include "fovea/select_backend.h"
#include "support/address_space_limit.h"
#include "support/count_allocations.h"
#include "support/expect_error.h"

namespace fovea {
namespace {

// Runs `action` with its first allocation failing, then its second, and so on until none fails.
// Each failure must be an Error with the words in it. Returns the number of failures.
int fail_each_allocation(const char* words, const std::function<void()>& action) {
  for (int failures = 0;; ++failures) {
    test::allocations_before_failure = failures;
    try {
      action();
      // Streams of the standard library swallow some failures.
      if (test::allocations_before_failure.exchange(-1) >= 0) return failures;
    } catch (const Error& error) {
      test::allocations_before_failure = -1;
      EXPECT_EQ(error.code(), ErrorCode::out_of_memory) << error.what();
      EXPECT_NE(std::string(error.what()).find(words), std::string::npos) << error.what();
    } catch (const std::exception& error) {
      test::allocations_before_failure = -1;
      ADD_FAILURE() << words << ": " << error.what() << " at allocation " << failures;
      return failures;
    }
  }
}

KvCacheSpec cache_of(int32_t window) {
  return {.layers = 2,
          .kv_heads = 1,
          .head_dim = 8,
          .head_dim_v = 8,
          .page_size = test::kPage,
          .window = window};
}

TEST(ExhaustedMemory, StorageNamesWhatItIsAskedFor) {
  const std::vector<std::pair<const char*, std::function<void()>>> actions = {
      {"a request table of 40 rows", [] { RequestTable(40, 8); }},
      {"a page allocator of 40 pages", [] { PageAllocator(40, 4); }},
      {"a KV pool of 12 pages", [] { make_kv_pool(cache_of(0), 12); }},
      {"a window KV pool of 12 pages over 48 slots",
       [] { make_window_kv_pool(cache_of(8), 12, 48); }},
      {"a state pool of 5 slots",
       [] {
         make_state_pool({.layers = 1, .conv_width = 1, .heads = 1, .rows = 2, .columns = 2}, 5);
       }},
      {"a pool of 3 threads", [] { ThreadPool(3); }},
  };
  for (const auto& [words, action] : actions) {
    EXPECT_GT(fail_each_allocation(words, action), 0) << words;
  }
}

TEST(ExhaustedMemory, AllocatorsTakeNothing) {
  PageAllocator allocator(40, 4);
  std::vector<int64_t> slots, pages;
  const auto grow = [&] {
    slots.shrink_to_fit();
    pages.shrink_to_fit();
    const int64_t free = allocator.free_pages();
    const auto unchanged = [&] { EXPECT_EQ(allocator.free_pages(), free); };
    try {
      allocator.extend(0, 30, -1, slots);
    } catch (const Error&) {
      unchanged();
      throw;
    }
  };
  EXPECT_EQ(fail_each_allocation("the slots of 30 new tokens", grow), 1);
  EXPECT_EQ(slots.size(), 30u);
  EXPECT_EQ(fail_each_allocation("a list of 9 pages", [&] { allocator.allocate(9, pages); }), 1);
  EXPECT_EQ(pages.size(), 9u);
  EXPECT_EQ(allocator.free_pages(), 39 - 8 - 9);
}

TEST(ExhaustedMemory, BackendsNameThemselvesOrTheirWorkspace) {
  for (const AttentionKind kind : {AttentionKind::mha, AttentionKind::mla}) {
    test::TwoRequests fixture;
    if (kind == AttentionKind::mla) {
      fixture.spec.kind = kind;
      fixture.spec.head_dim = fixture.spec.head_dim_v = 0;
      fixture.spec.mla.kv_lora_rank = 8;
      fixture.spec.scores.softmax_scale = 1;
      fixture.cache.layout = KvLayout::mla;
    }
    const auto pool = make_kv_pool(fixture.cache, test::kPages);
    const BackendRegistry registry = BackendRegistry::builtin();
    for (const char* name : {"cpu", "reference"}) {
      const BackendEntry& entry = *registry.find(name);
      if (!entry.reject({fixture.spec, fixture.cache, fixture.limits, cpu_device()}).empty()) {
        continue;  // a processor without AVX2
      }
      std::unique_ptr<AttentionBackend> backend;
      EXPECT_GT(fail_each_allocation(
                    "backend '",
                    [&] {
                      backend = entry.create({fixture.spec, pool.get(), nullptr, &fixture.threads});
                    }),
                0);
      backend->reserve(fixture.limits);
      int allocation = 0;
      for (const char* words : {"the slots of 5 new tokens", "the workspace of backend '"}) {
        test::allocations_before_failure = allocation++;
        test::expect_error(ErrorCode::out_of_memory, words,
                           [&] { backend->reserve(fixture.limits); });
        EXPECT_LT(test::allocations_before_failure, 0);
        backend->plan(fixture.batch);  // the earlier reservation is still valid
      }
    }
  }
}

TEST(ExhaustedMemory, MergersNameTheStates) {
  ThreadPool threads(1);
  std::vector<float> a(64, 1), b(64, 2), lse_a(8, 0), lse_b(8, 0);
  const AttentionState into{dense_rows(a.data(), DType::f32, 2, 8), NaturalLse(lse_a.data())};
  const AttentionState part{dense_rows(b.data(), DType::f32, 2, 8), NaturalLse(lse_b.data())};
  const auto merger = make_state_merger({DType::f32, 2, 8}, {}, &threads);
  EXPECT_GT(fail_each_allocation("the states of 4 tokens of 2 heads of 8",
                                 [&] { merger->merge(into, part, 4); }),
            0);
  EXPECT_FLOAT_EQ(a[0], 1.5f);  // merged once, by the call that succeeded
}

// After a failed insert(), pages are evicted in the right order: clear() frees all of them at once.
TEST(ExhaustedMemory, PrefixesStayWholeWhereAnInsertFails) {
  const std::vector<int32_t> a = {1, 2, 3, 4}, b = {9, 9, 9, 9};
  const std::vector<int32_t> abc = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12};
  const PrefixDomain domain{.model = "m"};
  int failures = 0;
  for (bool failed = true; failed; ++failures) {
    SCOPED_TRACE(failures);
    PageAllocator pages(16, 4);
    PrefixCache cache(pages, nullptr);
    std::vector<int64_t> mine;
    pages.allocate(4, mine);
    cache.insert(domain, a, std::vector<int64_t>{mine[0]});
    cache.insert(domain, b, std::vector<int64_t>{mine[1]});  // makes the others older
    const std::vector<int64_t> three = {mine[0], mine[2], mine[3]};
    test::allocations_before_failure = failures;
    try {
      cache.insert(domain, abc, three);
      failed = false;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::out_of_memory) << error.what();
    }
    test::allocations_before_failure = -1;
    for (const int64_t page : mine) pages.release(page);
    const int64_t held = pages.pages() - 1 - pages.free_pages();
    EXPECT_EQ(cache.stats().pages, held);
    EXPECT_EQ(static_cast<int64_t>(cache.clear().size()), held);
    EXPECT_EQ(pages.free_pages(), 15);
  }
  EXPECT_GT(failures, 3);
}

TEST(ExhaustedMemory, PrefixCachesNameTheTokens) {
  PageAllocator pages(16, 4);
  const PrefixDomain domain{.model = "m"};
  const std::vector<int32_t> tokens = {1, 2, 3, 4, 5, 6, 7, 8};
  EXPECT_GT(
      fail_each_allocation("a prefix cache over 16 pages", [&] { PrefixCache(pages, nullptr); }),
      0);
  PrefixCache cache(pages, nullptr);
  std::vector<int64_t> mine;
  pages.allocate(2, mine);
  const auto insert = [&] { cache.insert(domain, tokens, mine); };
  EXPECT_GT(fail_each_allocation("a cached prefix of 8 tokens", insert), 0);
  const auto match = [&] { EXPECT_EQ(cache.match(domain, tokens, 8).tokens, 8); };
  EXPECT_GT(fail_each_allocation("a search for 8 tokens in the prefix cache", match), 0);
  EXPECT_EQ(pages.references(mine[0]), 3);  // mine, the cache's, and that of one match
  const auto pin = [&] { EXPECT_EQ(cache.pin(domain, tokens), 8); };
  EXPECT_GT(fail_each_allocation("a search for 8 tokens in the prefix cache", pin), 0);
  cache.unpin(domain, tokens);
  const auto evict = [&] { EXPECT_TRUE(cache.evict(2).empty()); };
  EXPECT_GT(fail_each_allocation("a list of 2 freed pages", evict), 0);
}

// No destructor allocates memory.
TEST(ExhaustedMemory, PrefixCachesEndWithoutMemory) {
  PageAllocator pages(16, 4);
  auto cache = std::make_unique<PrefixCache>(pages, nullptr);
  std::vector<int64_t> mine;
  pages.allocate(4, mine);
  cache->insert({.model = "m"}, std::vector<int32_t>(16, 7), mine);
  for (const int64_t page : mine) pages.release(page);
  test::allocations_before_failure = 0;
  cache.reset();
  EXPECT_EQ(test::allocations_before_failure.exchange(-1), 0);
  EXPECT_EQ(pages.free_pages(), 15);
}

// Sizes that no machine has.
TEST(ExhaustedMemory, SizesBeyondTheSystemAreNamed) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a sanitizer maps more than any limit";
#endif
  test::TwoRequests fixture;
  fixture.create();
  BatchLimits many = fixture.limits;
  many.max_requests = 1 << 28;
  BatchLimits tokens = fixture.limits;
  tokens.max_tokens = std::numeric_limits<int32_t>::max() / fixture.spec.q_heads;
  const std::vector<std::pair<const char*, std::function<void()>>> actions = {
      {"the workspace of backend 'reference' of", [&] { fixture.backend->reserve(many); }},
      {"the slots of 1073741823 new tokens", [&] { fixture.backend->reserve(tokens); }},
      {"a request table of 268435456 rows", [] { RequestTable(1 << 28, 1); }},
      {"a page allocator of 1073741824 pages", [] { PageAllocator(1 << 30, 1); }},
      {"a window KV pool of 6 pages over 2147483632 slots",
       [] { make_window_kv_pool(cache_of(8), 6, 2147483632); }},
      {"bytes", [] { make_kv_pool(cache_of(0), 1 << 28); }},
  };
  for (const auto& [words, action] : actions) {
    std::string said = "nothing was thrown";
    {
      const test::AddressSpaceLimit limit(size_t{1500} << 20);
      try {
        action();
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::out_of_memory);
        said = error.what();
      }
    }
    EXPECT_NE(said.find(words), std::string::npos) << said;
  }
}

}  // namespace
}  // namespace fovea
