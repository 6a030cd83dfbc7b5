// SPDX-License-Identifier: Apache-2.0
#include "engine/cache_set.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <set>
#include <vector>

#include "engine/cache_contents.h"
#include "engine/tiny_caches.h"
#include "support/cases.h"

namespace fovea {
namespace {

std::vector<int32_t> numbered(int32_t count, int32_t first = 0) {
  std::vector<int32_t> tokens(static_cast<size_t>(count));
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

std::vector<int32_t> slots_of(CacheSet& caches, const CacheLease& lease) {
  const auto row = caches.table().row(lease.row);
  return {row.begin(), row.begin() + lease.tokens};
}

// Computes all of `tokens` as one request does and leaves them cached.
void compute(CacheSet& caches, const std::vector<int32_t>& tokens, std::string_view salt = {}) {
  std::optional<CacheLease> lease = caches.admit({tokens, salt}, true, 0);
  ASSERT_TRUE(lease);
  ASSERT_TRUE(caches.extend(*lease, lease->cached_tokens, static_cast<int32_t>(tokens.size())));
  caches.publish(*lease, {tokens, salt});
  caches.release(*lease);
}

TEST(CacheSet, EveryGroupHasItsPool) {
  const CacheSet caches(tiny_cache_options({.window_pages = 3, .window = 1, .state_slots = 2}));
  ASSERT_NE(caches.kv(0), nullptr);
  ASSERT_NE(caches.kv(1), nullptr);
  EXPECT_TRUE(caches.kv(0)->slot_map().empty());
  EXPECT_FALSE(caches.kv(1)->slot_map().empty());
  EXPECT_EQ(caches.kv(2), nullptr);
  EXPECT_EQ(caches.state(0), nullptr);
  EXPECT_NE(caches.state(2), nullptr);
}

TEST(CacheSet, SlotsKeepTheirPlaceInThePage) {
  CacheSet caches(tiny_cache_options({}));
  const std::vector<int32_t> tokens = numbered(10);
  std::optional<CacheLease> lease = caches.admit({tokens, ""}, true, 0);
  ASSERT_TRUE(lease);
  EXPECT_EQ(lease->tokens, 10);
  EXPECT_EQ(lease->cached_tokens, 0);
  ASSERT_TRUE(caches.extend(*lease, 10, 11));
  const std::vector<int32_t> slots = slots_of(caches, *lease);
  ASSERT_EQ(slots.size(), 11u);
  for (size_t i = 0; i < slots.size(); ++i) {
    EXPECT_EQ(slots[i] % 4, static_cast<int32_t>(i % 4));
    EXPECT_GE(slots[i], 4) << "page 0 is reserved";
  }
  EXPECT_EQ(std::set<int32_t>(slots.begin(), slots.end()).size(), slots.size());
  caches.release(*lease);
  EXPECT_EQ(lease->row, 0);
  EXPECT_TRUE(caches.empty());
}

TEST(CacheSet, ReusesAllButTheLastToken) {
  CacheSet caches(tiny_cache_options({}));
  for (const int32_t length : {7, 8, 9}) {
    const std::vector<int32_t> tokens = numbered(length, 100 * length);
    compute(caches, tokens);
    std::optional<CacheLease> lease = caches.admit({tokens, ""}, true, 0);
    ASSERT_TRUE(lease);
    EXPECT_EQ(lease->cached_tokens, (length - 1) / 4 * 4);
    caches.release(*lease);
    lease = caches.admit({tokens, ""}, false, 0);
    ASSERT_TRUE(lease);
    EXPECT_EQ(lease->cached_tokens, 0) << "reuse was declined";
    caches.release(*lease);
  }
  caches.clear();
  EXPECT_TRUE(caches.empty());
}

TEST(CacheSet, EqualTextsComputedTogetherEndUpShared) {
  for (const TinyCaches tiny : {TinyCaches{}, TinyCaches{.window_pages = 12}}) {
    CacheSet caches(tiny_cache_options(tiny));
    const std::vector<int32_t> tokens = numbered(13);
    std::optional<CacheLease> first = caches.admit({tokens, ""}, true, 0);
    std::optional<CacheLease> second = caches.admit({tokens, ""}, true, 0);
    ASSERT_TRUE(first && second);
    ASSERT_TRUE(caches.extend(*first, 0, 13) && caches.extend(*second, 0, 13));
    EXPECT_EQ(caches.pages().free_pages(), 20 - 8);
    caches.publish(*first, {tokens, ""});
    caches.publish(*second, {tokens, ""});
    EXPECT_EQ(caches.pages().free_pages(), 20 - 5) << "three full pages, two tails";
    const std::vector<int32_t> one = slots_of(caches, *first), two = slots_of(caches, *second);
    EXPECT_TRUE(std::equal(one.begin(), one.begin() + 12, two.begin()));
    EXPECT_NE(one[12], two[12]);
    caches.release(*first);
    caches.release(*second);
    caches.clear();
    EXPECT_TRUE(caches.empty());
  }
}

TEST(CacheSet, OtherSaltsShareNothing) {
  CacheSet caches(tiny_cache_options({}));
  const std::vector<int32_t> tokens = numbered(9);
  compute(caches, tokens, "a");
  for (const bool same : {false, true}) {
    std::optional<CacheLease> lease = caches.admit({tokens, same ? "a" : "b"}, true, 0);
    ASSERT_TRUE(lease);
    EXPECT_EQ(lease->cached_tokens, same ? 8 : 0);
    caches.release(*lease);
  }
}

TEST(CacheSet, FailedAdmissionTakesNothing) {
  for (const TinyCaches tiny :
       {TinyCaches{.pages = 3}, TinyCaches{.window_pages = 1}, TinyCaches{.state_slots = 1},
        TinyCaches{.max_requests = 1}, TinyCaches{.state_slots = 1, .prefix_cache = false}}) {
    CacheSet caches(tiny_cache_options(tiny));
    const std::vector<int32_t> small = numbered(4), large = numbered(14, 50);
    std::optional<CacheLease> first = caches.admit({small, ""}, true, 0);
    ASSERT_TRUE(first);
    ASSERT_TRUE(caches.extend(*first, 0, 4));
    const int64_t free = caches.pages().free_pages();
    const int32_t rows = caches.table().available();
    std::optional<CacheLease> second = caches.admit({large, ""}, true, 0);
    if (second) {  // extend reserves the window
      EXPECT_FALSE(caches.extend(*second, 0, 14));
      caches.release(*second);
    }
    EXPECT_EQ(caches.pages().free_pages(), free);
    EXPECT_EQ(caches.table().available(), rows);
    caches.release(*first);
    EXPECT_TRUE(caches.empty());
  }
}

TEST(CacheSet, SparePagesStayFree) {
  CacheSet caches(tiny_cache_options({.pages = 4}));
  const std::vector<int32_t> tokens = numbered(12);
  EXPECT_FALSE(caches.admit({tokens, ""}, true, 2));
  std::optional<CacheLease> lease = caches.admit({tokens, ""}, true, 1);
  EXPECT_TRUE(lease);
  caches.release(*lease);
}

TEST(CacheSet, EvictsCachedPrefixesForNewRequests) {
  CacheSet caches(tiny_cache_options({.pages = 4}));
  for (int32_t i = 0; i < 5; ++i) compute(caches, numbered(16, 100 * i));
  EXPECT_EQ(caches.pages().free_pages(), 0);
  caches.clear();
  EXPECT_TRUE(caches.empty());
}

TEST(CacheSet, WindowsSlide) {
  struct Case {
    int32_t window, pages;  // enough for any length in single steps of 4 tokens
  };
  for (const auto [tokens_seen, pages] : {Case{6, 3}, Case{5, 2}, Case{2, 2}, Case{1, 1}}) {
    SCOPED_TRACE(tokens_seen);
    CacheSet caches(
        tiny_cache_options({.window_pages = pages, .window = tokens_seen, .prefix_cache = false}));
    const std::vector<int32_t> tokens = numbered(1);
    std::optional<CacheLease> lease = caches.admit({tokens, ""}, true, 0);
    ASSERT_TRUE(lease);
    const KvPool& window = *caches.kv(1);
    for (int32_t end = 1; end <= 40; ++end) {
      ASSERT_TRUE(caches.extend(*lease, end - 1, end)) << end;
      const std::vector<int32_t> slots = slots_of(caches, *lease);
      for (int32_t i = std::max(0, end - tokens_seen); i < end; ++i) {
        const int64_t here = window.slot_map()[static_cast<size_t>(slots[static_cast<size_t>(i)])];
        EXPECT_GE(here, 4) << "token " << i << " of " << end;
      }
    }
    caches.release(*lease);
    EXPECT_TRUE(caches.empty());
  }
}

TEST(CacheSet, TruncatedTokensGiveBackTheirPages) {
  CacheSet caches(tiny_cache_options({.window_pages = 4, .window = 5}));
  const std::vector<int32_t> tokens = numbered(6);
  std::optional<CacheLease> lease = caches.admit({tokens, ""}, true, 0);
  ASSERT_TRUE(lease);
  ASSERT_TRUE(caches.extend(*lease, 5, 6));
  const int64_t free = caches.pages().free_pages();
  const std::vector<int32_t> slots = slots_of(caches, *lease);
  ASSERT_TRUE(caches.extend(*lease, 5, 15));
  EXPECT_EQ(caches.pages().free_pages(), free - 2);
  EXPECT_FALSE(caches.extend(*lease, 5, 21)) << "the window pool has four pages";
  caches.truncate(*lease, 6);
  EXPECT_EQ(caches.pages().free_pages(), free);
  EXPECT_EQ(slots_of(caches, *lease), slots);
  const auto pages_mapped = [&] {
    return std::ranges::count_if(caches.kv(1)->slot_map(), [](auto slot) { return slot >= 4; }) / 4;
  };
  EXPECT_EQ(pages_mapped(), 2);
  caches.truncate(*lease, 40);
  EXPECT_EQ(lease->tokens, 6) << "truncate() adds nothing";
  caches.release(*lease);
  EXPECT_TRUE(caches.empty());
}

TEST(CacheSet, HitsNeedTheLastWindow) {
  CacheSet caches(tiny_cache_options({.pages = 40, .window_pages = 7}));
  const std::vector<int32_t> tokens = numbered(25);
  compute(caches, tokens);
  std::optional<CacheLease> hit = caches.admit({tokens, ""}, true, 0);
  ASSERT_TRUE(hit);
  EXPECT_EQ(hit->cached_tokens, 24);
  caches.release(*hit);
  // Another text evicts the first one's pages from the window pool.
  const std::vector<int32_t> other = numbered(25, 500);
  compute(caches, other);
  std::optional<CacheLease> miss = caches.admit({tokens, ""}, true, 0);
  ASSERT_TRUE(miss);
  EXPECT_EQ(miss->cached_tokens, 0) << "the full pool has the prefix, the window pool has not";
  caches.release(*miss);
  caches.clear();
  EXPECT_TRUE(caches.empty());
}

TEST(CacheSet, SharedWindowPagesOutliveTheFirstUser) {
  CacheSet caches(tiny_cache_options({.pages = 40, .window_pages = 8}));
  const std::vector<int32_t> tokens = numbered(9);
  compute(caches, tokens);
  std::optional<CacheLease> slides = caches.admit({tokens, ""}, true, 0);
  std::optional<CacheLease> stays = caches.admit({tokens, ""}, true, 0);
  ASSERT_TRUE(slides && stays);
  ASSERT_TRUE(caches.extend(*slides, 8, 9) && caches.extend(*stays, 8, 9));
  for (int32_t end = 10; end <= 30; ++end) ASSERT_TRUE(caches.extend(*slides, end - 1, end));
  const std::vector<int32_t> slots = slots_of(caches, *stays);
  for (size_t i = 3; i < 9; ++i)
    EXPECT_GE(caches.kv(1)->slot_map()[static_cast<size_t>(slots[i])], 4) << i;
  caches.release(*slides);
  caches.release(*stays);
}

// Random requests over few texts. Whatever a request reads must come from its own tokens, in every
// pool.
class Churn {
 public:
  Churn(const TinyCaches& tiny, uint32_t seed)
      : tiny_(tiny), caches_(tiny_cache_options(tiny)), contents_(tiny, caches_), random_(seed) {}

  void run(int steps) {
    for (int step = 0; step < steps && !::testing::Test::HasFailure(); ++step) {
      switch (random_() % 8) {
        case 0:
        case 1:
          admit();
          break;
        case 2:
          if (!active_.empty()) release(random_() % active_.size());
          break;
        case 3:
          if (random_() % 50 == 0) caches_.clear();
          break;
        default:
          if (!active_.empty()) advance(random_() % active_.size());
      }
    }
    while (!active_.empty()) release(0);
    caches_.clear();
    EXPECT_TRUE(caches_.empty());
    EXPECT_GT(hits_, 0);
    EXPECT_GT(refused_, 0) << "the pools were never full";
    EXPECT_GT(accepted_, 0);
    EXPECT_GT(drafts_, accepted_);
  }

 private:
  struct Active {
    CacheLease lease;
    std::vector<int32_t> tokens;
    int32_t computed = 0;
  };

  void admit() {
    Active request;
    const auto length = static_cast<int32_t>(1 + random_() % 24);
    const auto fork = static_cast<int32_t>(random_() % 24);
    const auto text = static_cast<int32_t>(random_() % 3);
    for (int32_t i = 0; i < length; ++i)
      request.tokens.push_back(i < fork ? text : static_cast<int32_t>(random_() % 3));
    std::optional<CacheLease> lease = caches_.admit({request.tokens, ""}, true, 0);
    if (!lease) {
      ++refused_;
      return;
    }
    request.lease = std::move(*lease);
    request.computed = request.lease.cached_tokens;
    hits_ += request.computed;
    active_.push_back(std::move(request));
  }

  void advance(size_t index) {
    Active& request = active_[index];
    auto length = static_cast<int32_t>(request.tokens.size());
    if (request.computed == length && length < tiny_.max_context) {
      request.tokens.push_back(static_cast<int32_t>(random_() % 3));
      ++length;
    }
    if (request.computed == length) return;
    const int32_t begin = request.computed;
    const int32_t end = begin + 1 + static_cast<int32_t>(random_() % (length - begin));
    if (!caches_.extend(request.lease, begin, end)) {
      ++refused_;
      release(random_() % active_.size());
      return;
    }
    request.computed = end;
    if (end < length || !compute_drafts(request, begin))
      contents_.compute(request.lease, request.tokens, "", begin, end);
    if (random_() % 2 == 0) {
      const auto computed = static_cast<size_t>(request.computed);
      caches_.publish(request.lease, {std::span(request.tokens).first(computed), ""});
    }
  }

  // Computes the request's last tokens and some drafts, the first of which become its text. Returns
  // false if there are no drafts.
  bool compute_drafts(Active& request, int32_t begin) {
    const int32_t end = request.computed;
    const auto drafts = std::min(static_cast<int32_t>(random_() % 12), tiny_.max_context - end);
    if (drafts == 0) return false;
    const auto accepted = static_cast<int32_t>(random_() % static_cast<uint32_t>(drafts + 1));
    std::vector<int32_t> text = request.tokens;
    for (int32_t i = 0; i < accepted; ++i) text.push_back(static_cast<int32_t>(random_() % 3));
    std::vector<int32_t> guessed = text;
    guessed.resize(static_cast<size_t>(end + drafts), kDraft);
    if (!caches_.extend(request.lease, begin, end + drafts) ||
        !caches_.hold_draft_states(request.lease, drafts)) {
      caches_.truncate(request.lease, end);
      return false;
    }
    contents_.compute(request.lease, guessed, "", begin, end + drafts);
    caches_.truncate(request.lease, end + accepted);
    EXPECT_EQ(request.lease.tokens, end + accepted);
    EXPECT_TRUE(request.lease.draft_states.empty());
    request.tokens = text;
    request.computed = end + accepted;
    drafts_ += drafts;
    accepted_ += accepted;
    return true;
  }

  void release(size_t index) {
    caches_.release(active_[index].lease);
    active_.erase(active_.begin() + static_cast<int64_t>(index));
  }

  TinyCaches tiny_;
  CacheSet caches_;
  CacheContents contents_;
  std::mt19937 random_;
  std::vector<Active> active_;
  static constexpr int32_t kDraft = 9;  // no token of a text
  int refused_ = 0;
  int64_t hits_ = 0, drafts_ = 0, accepted_ = 0;
};

TEST(CacheSet, RandomRequestsReadTheirOwnTokens) {
  const int steps = 20000 * test::test_scale();
  Churn({.pages = 20}, 1).run(steps);
  Churn({.page_size = 1, .pages = 60}, 2).run(steps);
  Churn({.pages = 24, .window_pages = 12}, 3).run(steps);
  Churn({.page_size = 3, .pages = 30, .window_pages = 10, .window = 5}, 4).run(steps);
  Churn({.pages = 20, .state_slots = 6}, 5).run(steps);
  Churn({.pages = 20, .window_pages = 10, .state_slots = 5}, 6).run(steps);
  Churn({.page_size = 1, .pages = 60, .window_pages = 8, .window = 1, .state_slots = 6}, 7)
      .run(steps);
}

}  // namespace
}  // namespace fovea
