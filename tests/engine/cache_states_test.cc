// SPDX-License-Identifier: Apache-2.0
// Recurrent states as parts of cached pages: keys, states and convolution windows of a request are
// always of one length, and nothing of a slot's last owner reaches the next one.
#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "engine/cache_contents.h"
#include "engine/tiny_caches.h"

namespace fovea {
namespace {

std::vector<int32_t> numbered(int32_t count) {
  std::vector<int32_t> tokens(static_cast<size_t>(count));
  std::iota(tokens.begin(), tokens.end(), 100);
  return tokens;
}

// One request computes a text, offers its pages on the way, and leaves.
void compute_and_offer(CacheSet& caches, CacheContents& contents, std::span<const int32_t> tokens,
                       int32_t step) {
  std::optional<CacheLease> lease = caches.admit({tokens, ""}, true, 0);
  ASSERT_TRUE(lease);
  const auto length = static_cast<int32_t>(tokens.size());
  for (int32_t begin = lease->cached_tokens; begin < length; begin += step) {
    const int32_t end = std::min(begin + step, length);
    ASSERT_TRUE(caches.extend(*lease, begin, end));
    contents.compute(*lease, tokens, "", begin, end);
    caches.publish(*lease, {tokens.first(static_cast<size_t>(end)), ""});
  }
  caches.release(*lease);
}

// Steps of 4 offer a snapshot after each page, steps of 3 after every third, steps of 5 after every
// fifth. A hit ends at the deepest one; CacheContents holds keys, states and windows against the
// text.
TEST(CacheStates, HitsBringKeysStateAndWindowOfOneLength) {
  for (const auto& [step, hit] : {std::pair{4, 20}, {3, 12}, {5, 20}, {23, 0}}) {
    SCOPED_TRACE(step);
    const TinyCaches tiny{.pages = 30, .state_slots = 12};
    CacheSet caches(tiny_cache_options(tiny));
    CacheContents contents(tiny, caches);
    const std::vector<int32_t> tokens = numbered(23);
    compute_and_offer(caches, contents, tokens, step);
    std::optional<CacheLease> lease = caches.admit({tokens, ""}, true, 0);
    ASSERT_TRUE(lease);
    EXPECT_EQ(lease->cached_tokens, hit);
    ASSERT_TRUE(caches.extend(*lease, hit, 23));
    contents.compute(*lease, tokens, "", hit, 23);
    caches.release(*lease);
    caches.clear();
    EXPECT_TRUE(caches.empty());
  }
}

// The hit is a copy: what its request computes leaves the snapshot as it was.
TEST(CacheStates, RequestsThatContinueLeaveTheSnapshotAlone) {
  const TinyCaches tiny{.state_slots = 6};
  CacheSet caches(tiny_cache_options(tiny));
  CacheContents contents(tiny, caches);
  const std::vector<int32_t> tokens = numbered(9);
  compute_and_offer(caches, contents, tokens, 4);
  for (int32_t i = 0; i < 3; ++i) {
    std::vector<int32_t> other = tokens;
    other.back() = 7 + i;
    compute_and_offer(caches, contents, other, 1);
  }
}

// Preempted requests give up slot and pages; the next owner of the slot starts from zero.
TEST(CacheStates, SlotsOfPreemptedRequestsStartFromZero) {
  const TinyCaches tiny{.state_slots = 1, .prefix_cache = false};
  CacheSet caches(tiny_cache_options(tiny));
  CacheContents contents(tiny, caches);
  const std::vector<int32_t> tokens = numbered(7);
  int32_t slot = -1;
  for (int32_t turn = 0; turn < 3; ++turn) {
    std::optional<CacheLease> lease = caches.admit({tokens, ""}, true, 0);
    ASSERT_TRUE(lease);
    if (turn > 0) {
      EXPECT_EQ(lease->state_slot, slot);
    }
    slot = lease->state_slot;
    EXPECT_FALSE(caches.admit({tokens, ""}, true, 0)) << "there is one slot";
    ASSERT_TRUE(caches.extend(*lease, 0, 5 + turn));
    contents.compute(*lease, tokens, "", 0, 5 + turn);
    caches.release(*lease);
  }
  EXPECT_TRUE(caches.empty());
}

// Pages that are evicted take their snapshots along, and a snapshot that is evicted alone shortens
// the hit. In both cases a slot becomes free.
TEST(CacheStates, SnapshotsAreEvictedWithTheirPages) {
  const TinyCaches tiny{.pages = 6, .state_slots = 4};
  CacheSet caches(tiny_cache_options(tiny));
  CacheContents contents(tiny, caches);
  compute_and_offer(caches, contents, numbered(9), 4);
  StatePool& states = *caches.state(1);
  EXPECT_EQ(states.free_slots(), 2);
  std::vector<int32_t> other = numbered(23);
  for (int32_t& token : other) token += 1000;
  std::optional<CacheLease> lease = caches.admit({other, ""}, true, 0);
  ASSERT_TRUE(lease) << "all pages of the cached text are needed";
  EXPECT_EQ(states.free_slots(), 3) << "both snapshots went with their pages";
  caches.release(*lease);
  EXPECT_TRUE(caches.empty());
}

}  // namespace
}  // namespace fovea
