// SPDX-License-Identifier: Apache-2.0
// All caches of a model. A request takes and returns its memory in all of them together.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/memory_budget.h"
#include "engine/window_pages.h"
#include "fovea/kv_cache.h"
#include "fovea/prefix_cache.h"

namespace fovea {

struct CacheSetOptions {
  std::vector<CacheGroup> groups;  // at most one group of linear layers
  MemoryPlan plan;                 // sizes for these groups
  int32_t page_size = 16;
  int32_t max_requests = 1;
  bool prefix_cache = false;
  Device device;  // device of the pools
  // Further properties that cached KV must have in common to be interchangeable, see PrefixDomain.
  std::string model, kv_format;
};

// The memory of one request. Window pages cover the request's pages [begin, end).
struct CacheLease {
  struct Pages {
    int32_t begin = 0, end = 0;
  };
  int32_t row = 0;            // row of the request table; 0 if nothing is held
  int32_t tokens = 0;         // number of slots listed in the row
  int32_t cached_tokens = 0;  // tokens filled by earlier requests, a part of `tokens`
  int32_t state_slot = -1;    // -1 without linear layers
  // With linear layers, while a pass verifies drafts: how many of them state_slot keeps, or the
  // slots of the states after its tokens but the last one, whose state is that of state_slot.
  int32_t kept_drafts = 0;
  std::vector<int32_t> draft_states;
  std::vector<Pages> windows;  // one entry per window pool
};

// Tokens whose KV may be reused, and the prefix domain in which it may be.
struct CachedText {
  std::span<const int32_t> tokens;
  std::string_view salt;
};

// The full pools of all groups share one slot numbering. Slots handed out for writing never lie in
// a page with several owners.
class CacheSet {
 public:
  explicit CacheSet(CacheSetOptions options);

  // Admits a request: takes a table row, a state, slots for all of `text`, and the prefix of `text`
  // that the prefix cache has, except for the last token. Leaves at least spare_pages free, and
  // evicts unused cached prefixes if necessary. Returns nullopt, and takes nothing, if memory does
  // not suffice.
  std::optional<CacheLease> admit(const CachedText& text, bool reuse, int64_t spare_pages);

  // Makes tokens [begin, end) writable and the keys that they see readable, provided that all
  // tokens before `begin` are computed. Releases window pages that left the window. Returns false
  // if a pool is full; the lease then stays valid.
  bool extend(CacheLease& lease, int32_t begin, int32_t end);

  // With linear layers, prepares the state for a pass whose last `drafts` tokens are drafts. If
  // states do not keep drafts, takes a slot for the state before each of them. Returns false, and
  // takes none, if the pool is full.
  bool hold_draft_states(CacheLease& lease, int32_t drafts);

  // Gives back the memory of all tokens but the first `tokens`, which must include all that
  // publish() and admit() named. Rolls back an extend() for drafts. With linear layers, the state
  // becomes that after these tokens: one of those that hold_draft_states() took, or the last one,
  // or that of the slot and the drafts that it keeps.
  void truncate(CacheLease& lease, int32_t tokens);

  // Offers the full pages of `text`, which must be computed, to later requests. With linear layers
  // this takes a snapshot and works only at a page boundary; other lengths are ignored. If another
  // request has offered the same text, the lease gives up its copy.
  void publish(CacheLease& lease, const CachedText& text);

  void release(CacheLease& lease);  // the lease holds nothing afterwards

  // Drops all cached prefixes that no request uses.
  void clear();

  // On a GPU, enqueues on the stream what changed since the last call: entries of the window pools'
  // slot maps, cleared and copied states.
  void publish_changes(Stream stream);

  KvPool* kv(size_t group) const { return kv_[group]; }  // null for linear layers
  StatePool* state(size_t group) const;                  // null for other layers
  RequestTable& table() { return table_; }
  const PageAllocator& pages() const { return pages_; }
  int32_t page_size() const { return options_.page_size; }
  int64_t slots() const { return options_.plan.pages * options_.page_size; }
  bool prefix_cache() const { return prefix_ != nullptr; }
  bool has_state() const { return state_ != nullptr; }
  bool keeps_drafts() const { return state_ && state_->spec().max_drafts > 0; }
  bool empty() const;  // true if no pool holds anything

 private:
  PrefixDomain domain(std::string_view salt) const;
  bool take_state(CacheLease& lease);
  std::optional<int32_t> allocate_state();  // evicts a snapshot if no state is free
  void release_draft_states(CacheLease& lease);
  bool reuse_prefix(CacheLease& lease, const CachedText& text);
  PrefixMatch match(const CachedText& text);
  int32_t usable(std::span<const int64_t> pages) const;
  void adopt(CacheLease& lease, int32_t index, int64_t page);
  bool grow(CacheLease& lease, int32_t length, int64_t spare_pages);
  bool hold_windows(CacheLease& lease, int32_t begin, int32_t end);
  bool make_free(int64_t pages);
  void release_page(int64_t page);
  void forget(std::span<const int64_t> pages);
  int64_t page_of(const CacheLease& lease, int32_t index);
  void list_page(const CacheLease& lease, int32_t index, int64_t page);

  CacheSetOptions options_;
  PageAllocator pages_;
  RequestTable table_;
  std::vector<std::unique_ptr<KvPool>> full_pools_;
  std::vector<std::unique_ptr<WindowKvPool>> window_pools_;
  std::vector<WindowPages> windows_;  // one for each of window_pools_
  std::unique_ptr<StatePool> state_;
  // Slots of draft states that no lease has. They are not released, because a pool clears what it
  // allocates.
  std::vector<int32_t> spare_states_;
  std::unique_ptr<PrefixCache> prefix_;
  std::vector<KvPool*> kv_;            // one per group
  std::vector<int64_t> slots_, held_;  // scratch
};

}  // namespace fovea
