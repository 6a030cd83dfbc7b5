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

TEST(CacheStates, SnapshotsRestoreStates) {
  CacheSet caches(tiny_cache_options({.state_slots = 3}));
  StatePool& states = *caches.state(1);
  const std::vector<int32_t> tokens = numbered(12);
  std::optional<CacheLease> lease = caches.admit({tokens, ""}, true, 0);
  ASSERT_TRUE(lease);
  ASSERT_TRUE(caches.extend(*lease, 0, 8));
  set_state(states, lease->state_slot, 8);
  caches.publish(*lease, {std::span(tokens).first(8), ""});
  ASSERT_TRUE(caches.extend(*lease, 8, 11));
  set_state(states, lease->state_slot, 11);
  caches.publish(*lease, {std::span(tokens).first(11), ""});  // not a page boundary: ignored
  caches.release(*lease);

  lease = caches.admit({tokens, ""}, true, 0);
  ASSERT_TRUE(lease);
  EXPECT_EQ(lease->cached_tokens, 8);
  EXPECT_EQ(state_value(states, lease->state_slot), 8);
  caches.release(*lease);
  caches.clear();
  EXPECT_TRUE(caches.empty());
}

TEST(CacheStates, StatesBeforeDraftsAreKept) {
  CacheSet caches(tiny_cache_options({.state_slots = 6}));
  StatePool& states = *caches.state(1);
  const std::vector<int32_t> tokens = numbered(4);
  std::optional<CacheLease> lease = caches.admit({tokens, ""}, true, 0);
  ASSERT_TRUE(lease);
  for (const int32_t accepted : {0, 2, 3}) {
    const int32_t end = lease->tokens;
    ASSERT_TRUE(caches.extend(*lease, end - 1, end + 3));
    ASSERT_TRUE(caches.hold_draft_states(*lease, 3));
    ASSERT_EQ(lease->draft_states.size(), 3u);
    for (int32_t i = 0; i < 3; ++i) {
      set_state(states, lease->draft_states[static_cast<size_t>(i)], static_cast<float>(end + i));
    }
    set_state(states, lease->state_slot, static_cast<float>(end + 3));
    caches.truncate(*lease, end + accepted);
    EXPECT_EQ(state_value(states, lease->state_slot), static_cast<float>(end + accepted));
    EXPECT_TRUE(lease->draft_states.empty());
  }
  const int32_t end = lease->tokens;
  ASSERT_TRUE(caches.extend(*lease, end - 1, end + 6));
  EXPECT_FALSE(caches.hold_draft_states(*lease, 6)) << "the pool has 6 slots";
  EXPECT_TRUE(lease->draft_states.empty());
  caches.truncate(*lease, end);
  // Other requests get the slots, cleared, when there are no others.
  std::vector<CacheLease> others;
  const std::vector<int32_t> one = numbered(1);
  for (int i = 0; i < 3; ++i) {
    others.push_back(caches.admit({one, ""}, true, 0).value());
    EXPECT_EQ(state_value(states, others.back().state_slot), 0);
  }
  ASSERT_TRUE(caches.extend(*lease, end - 1, end + 2));
  ASSERT_TRUE(caches.hold_draft_states(*lease, 2));
  EXPECT_FALSE(caches.admit({one, ""}, true, 0)) << "all slots are taken";
  caches.release(*lease);  // with draft states, as a cancelled request
  for (CacheLease& other : others) caches.release(other);
  EXPECT_TRUE(caches.empty());
}

// A state that keeps its drafts takes no other slot, whatever becomes of them.
TEST(CacheStates, KeptDraftsTakeNoSlots) {
  CacheSet caches(tiny_cache_options({.state_slots = 1, .kept_drafts = 3}));
  const std::vector<int32_t> tokens = numbered(4);
  std::optional<CacheLease> lease = caches.admit({tokens, ""}, true, 0);
  ASSERT_TRUE(lease);
  const int32_t slot = lease->state_slot;
  for (const int32_t accepted : {0, 2, 3}) {
    const int32_t end = lease->tokens;
    ASSERT_TRUE(caches.extend(*lease, end - 1, end + 3));
    ASSERT_TRUE(caches.hold_draft_states(*lease, 3));
    EXPECT_EQ(lease->kept_drafts, 3);
    EXPECT_TRUE(lease->draft_states.empty());
    caches.truncate(*lease, end + accepted);
    EXPECT_EQ(lease->kept_drafts, 0);
    EXPECT_EQ(lease->state_slot, slot);
  }
  caches.release(*lease);
  EXPECT_TRUE(caches.empty());
}

}  // namespace
}  // namespace fovea
