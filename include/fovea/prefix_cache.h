// SPDX-License-Identifier: Apache-2.0
// Which pages hold the KV of which token prefix: a radix tree at page granularity.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "fovea/kv_cache.h"

namespace fovea {

// What makes cached KV interchangeable besides the tokens. Each field is hashed with its own tag
// and length, so that no two fields can imitate each other.
struct PrefixDomain {
  std::string_view model;
  std::string_view adapter;
  std::string_view kv_format;  // dtype and scales
  std::string_view salt;       // isolates tenants
};

// A page's identity: SHA-256 over the domain, the parent page's key and the page's tokens.
using PrefixKey = std::array<uint8_t, 32>;

struct PrefixMatch {
  int32_t tokens = 0;          // multiple of the page size
  std::vector<int64_t> pages;  // tokens / page_size of them, in order; retained for the caller
  int32_t state_slot = -1;     // snapshot of the linear layers after exactly `tokens` tokens
};

struct PrefixCacheStats {
  int64_t queries = 0;  // tokens asked for
  int64_t hits = 0;     // tokens served
  int64_t pages = 0;    // held by the tree
  int64_t evicted_pages = 0;
};

// Holds one reference on every page in the tree. Only full pages enter; they are never written
// again. The tokens are compared on a hit, so a hash collision costs time, never correctness.
class PrefixCache {
 public:
  // Both outlive the cache. state: null for models without linear layers; with it, a match ends
  // where a snapshot is.
  PrefixCache(PageAllocator& pages, StatePool* state);
  ~PrefixCache();

  // The longest cached prefix, at most max_tokens long. Its pages are retained for the caller, who
  // releases them with PageAllocator::release when done; until then they cannot be evicted.
  PrefixMatch match(const PrefixDomain& domain, std::span<const int32_t> tokens,
                    int32_t max_tokens);

  // Offers the full pages of `tokens`; where the tree already has a page, its own stays and the
  // offered one is ignored. state_slot >= 0: a snapshot after all `tokens` (a multiple of the page
  // size), whose ownership moves to the cache; -1: none.
  void insert(const PrefixDomain& domain, std::span<const int32_t> tokens,
              std::span<const int64_t> pages, int32_t state_slot = -1);

  // Frees least recently used leaves nobody else holds until `pages` allocator pages became free or
  // nothing more can go. Returns the pages freed, whose slots are then invalid.
  std::vector<int64_t> evict(int64_t pages);

  // Frees the least recently used snapshot. False: there is none.
  bool evict_state();

  // Pinned prefixes are not evicted until unpinned; pins nest. Returns the tokens pinned (what is
  // cached of `tokens`).
  int32_t pin(const PrefixDomain& domain, std::span<const int32_t> tokens);
  void unpin(const PrefixDomain& domain, std::span<const int32_t> tokens);

  // Drops everything not pinned and not held.
  std::vector<int64_t> clear();

  const PrefixCacheStats& stats() const;

 private:
  struct Tree;
  std::unique_ptr<Tree> tree_;
};

PrefixKey prefix_root_key(const PrefixDomain& domain);
PrefixKey prefix_page_key(const PrefixKey& parent, std::span<const int32_t> page_tokens);

}  // namespace fovea
