// SPDX-License-Identifier: Apache-2.0
// A shadow of the contents that requests store in the pools of a tiny CacheSet. It records for
// every slot which tokens its contents stand for, so that a test can compare what a request reads
// with its own tokens.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <span>
#include <string_view>
#include <vector>

#include "engine/tiny_caches.h"

namespace fovea {

class CacheContents {
 public:
  CacheContents(const TinyCaches& tiny, CacheSet& caches)
      : tiny_(tiny), caches_(caches), copy_(tiny.max_requests + 1, tiny.max_context) {}

  // Models a pass over tokens [begin, end) of a request whose slots are ready: reads what it stored
  // before in every pool, and stores the new tokens, and the states before drafts.
  void compute(const CacheLease& lease, std::span<const int32_t> tokens, std::string_view salt,
               int32_t begin, int32_t end) {
    const std::vector<uint64_t> wanted = contents(tokens.first(static_cast<size_t>(end)), salt);
    check_copy(lease.row);
    if (caches_.has_state() && begin > 0) {
      EXPECT_EQ(state_value(states(), lease.state_slot),
                state_of(wanted[static_cast<size_t>(begin) - 1]));
    }
    const std::span<const int32_t> slots = caches_.table().row(lease.row);
    for (int32_t i = 0; i < end; ++i) {
      const int32_t slot = slots[static_cast<size_t>(i)];
      const uint64_t content = wanted[static_cast<size_t>(i)];
      if (i < begin) {
        EXPECT_EQ(full_[slot], content) << "token " << i << " of a pass from " << begin;
      } else {
        EXPECT_EQ(caches_.pages().references(slot / tiny_.page_size), 1) << "writes a shared page";
        full_[slot] = content;
      }
      if (tiny_.window_pages == 0 || i < begin - tiny_.window + 1) continue;
      const int64_t here = caches_.kv(1)->slot_map()[static_cast<size_t>(slot)];
      ASSERT_GE(here, tiny_.page_size) << "token " << i << " of a pass from " << begin;
      if (i < begin) {
        EXPECT_EQ(window_[here], content) << "token " << i << " of a pass from " << begin;
      } else {
        window_[here] = content;
      }
    }
    // A request that begins here finds nothing of the slot's last owner.
    if (caches_.has_state() && begin == 0) {
      EXPECT_EQ(state_value(states(), lease.state_slot), 0);
    }
    if (!caches_.has_state()) return;
    size_t last = wanted.size() - 1;
    set_state(states(), lease.state_slot, state_of(wanted[last]));
    for (auto slot = lease.draft_states.rbegin(); slot != lease.draft_states.rend(); ++slot) {
      set_state(states(), *slot, state_of(wanted[--last]));
    }
  }

 private:
  // Returns for each token what its KV depends on: all tokens up to it.
  static std::vector<uint64_t> contents(std::span<const int32_t> tokens, std::string_view salt) {
    std::vector<uint64_t> all;
    uint64_t hash = 1469598103934665603u;
    for (const char c : salt) hash = (hash ^ static_cast<uint64_t>(c)) * 1099511628211u;
    for (const int32_t token : tokens) {
      hash = (hash ^ static_cast<uint64_t>(token)) * 1099511628211u;
      all.push_back(hash);
    }
    return all;
  }
  static float state_of(uint64_t content) { return static_cast<float>(content % (1 << 24)); }
  StatePool& states() { return *caches_.state(tiny_.window_pages > 0 ? 2 : 1); }

  // A copy that applies all changes since the last call, as a GPU's does, equals the table.
  void check_copy(int32_t row) {
    const std::span<const int32_t> slots = caches_.table().row(row);
    const std::span<int32_t> copied = copy_.row(row);
    const int32_t changed = caches_.table().take_changed(row);
    std::copy(slots.begin() + changed, slots.end(), copied.begin() + changed);
    EXPECT_TRUE(std::ranges::equal(copied, slots)) << "row " << row << " of a copy of the table";
  }

  TinyCaches tiny_;
  CacheSet& caches_;
  RequestTable copy_;
  std::map<int64_t, uint64_t> full_, window_;
};

}  // namespace fovea
