// SPDX-License-Identifier: Apache-2.0
// All caches of a model as one: what a request holds in them is taken and given back together.
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
  std::vector<CacheGroup> groups;  // at most one of linear layers
  MemoryPlan plan;                 // for these groups
  int32_t page_size = 16;
  int32_t max_requests = 1;
  bool prefix_cache = false;
  Device device;  // of the pools
  // What else makes cached KV interchangeable, see PrefixDomain.
  std::string model, kv_format;
};

// What one request holds. Its window pages are those of the request's pages [begin, end).
struct CacheLease {
  struct Pages {
    int32_t begin = 0, end = 0;
  };
  int32_t row = 0;             // of the request table; 0: nothing is held
  int32_t tokens = 0;          // slots listed in the row
  int32_t cached_tokens = 0;   // of these, filled by earlier requests
  int32_t state_slot = -1;     // -1: no linear layers
  std::vector<Pages> windows;  // per window pool
};

// Tokens whose KV may be shared, and with whom.
struct CachedText {
  std::span<const int32_t> tokens;
  std::string_view salt;
};

// The full pools of all groups share one slot numbering. A page with several owners is never in a
// range handed out for writing.
class CacheSet {
 public:
  explicit CacheSet(CacheSetOptions options);

  // One request more: a row, a state, slots for all of `text`, and what the prefix cache has of it
  // except its last token. At least spare_pages stay free. Evicts cached prefixes nobody holds when
  // room is needed. nullopt: nothing was taken.
  std::optional<CacheLease> admit(const CachedText& text, bool reuse, int64_t spare_pages);

  // Makes tokens [begin, end) writable and what they see readable, all before `begin` being
  // computed; window pages that left the window are given up. False: a pool is full; the lease
  // stays valid.
  bool extend(CacheLease& lease, int32_t begin, int32_t end);

  // Offers the full pages of `text`, all of it computed, to later requests. With linear layers that
  // takes a snapshot and needs a length at a page boundary; other lengths are ignored. Where
  // another request offered the same text before, the lease gives up its copy.
  void publish(CacheLease& lease, const CachedText& text);

  void release(CacheLease& lease);  // afterwards it holds nothing

  // Drops every cached prefix nobody holds.
  void clear();

  // On a GPU: what changed in the window pools' slot maps goes to the device, ordered by the
  // stream.
  void publish_slot_maps(Stream stream);

  KvPool* kv(size_t group) const { return kv_[group]; }  // null: linear
  StatePool* state(size_t group) const;                  // null: not linear
  RequestTable& table() { return table_; }
  const PageAllocator& pages() const { return pages_; }
  int32_t page_size() const { return options_.page_size; }
  bool prefix_cache() const { return prefix_ != nullptr; }
  bool has_state() const { return state_ != nullptr; }
  bool empty() const;  // no pool holds anything

 private:
  PrefixDomain domain(std::string_view salt) const;
  bool take_state(CacheLease& lease);
  std::optional<int32_t> allocate_state();  // evicts a snapshot if there is no other
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
  std::vector<WindowPages> windows_;  // of window_pools_
  std::unique_ptr<StatePool> state_;
  std::unique_ptr<PrefixCache> prefix_;
  std::vector<KvPool*> kv_;            // per group
  std::vector<int64_t> slots_, held_;  // scratch
};

}  // namespace fovea
