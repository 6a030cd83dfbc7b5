// SPDX-License-Identifier: Apache-2.0
// Finds the pages that hold the KV of a token prefix: a radix tree of pages.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "fovea/api.h"
#include "fovea/kv_cache.h"

namespace FOVEA_API fovea {

// The conditions, besides equal tokens, under which cached KV can be reused. The strings are read
// during a call and not kept. Each field is hashed with its own tag and length, so that different
// domains never collide by concatenation.
struct PrefixDomain {
  std::string_view model = {};
  std::string_view adapter = {};
  std::string_view kv_format = {};  // dtype and scales
  std::string_view salt = {};       // isolates tenants
};

// The identity of a page: SHA-256 of the parent page's key and the page's tokens. The parent of a
// first page is the key of the domain.
using PrefixKey = std::array<uint8_t, 32>;

struct PrefixMatch {
  int32_t tokens = 0;          // multiple of the page size
  std::vector<int64_t> pages;  // tokens / page_size pages, in order; retained for the caller
  // Snapshot of the linear layers after exactly `tokens` tokens; -1: no linear layers or no match.
  // It is not retained: copy it before the next insert or eviction.
  int32_t state_slot = -1;
};

struct PrefixCacheStats {
  int64_t queries = 0;  // tokens looked up
  int64_t hits = 0;     // tokens found
  int64_t pages = 0;    // pages in the tree
  int64_t evicted_pages = 0;
  int64_t snapshots = 0;  // snapshots in the tree
};

// A tree of full pages with their tokens. The cache holds one reference on every page in the tree;
// such pages are never written again. A hit compares the tokens, so a hash collision costs time but
// not correctness. All calls throw Error{out_of_memory} if the system has no memory; the cache then
// keeps its contents, and insert() may have added the first of the offered pages.
class PrefixCache {
 public:
  // Both must outlive the cache. `state` is null for models without linear layers; otherwise a
  // match ends at a snapshot.
  PrefixCache(PageAllocator& pages, StatePool* state);
  ~PrefixCache();

  // Returns the longest cached prefix of at most max_tokens tokens. Its pages are retained for the
  // caller: they cannot be evicted until the caller releases them by PageAllocator::release. They
  // are full and must not be written. To get the logits of the last token, pass
  // max_tokens = tokens.size() - 1.
  PrefixMatch match(const PrefixDomain& domain, std::span<const int32_t> tokens,
                    int32_t max_tokens);

  // Adds the full pages of `tokens`. If the tree already has a page, it keeps its own and ignores
  // the offered one. The caller keeps its own references. state_slot >= 0: a snapshot after all
  // `tokens` (a multiple of the page size), which the cache then owns; -1: none; a later insert may
  // add one. Throws Error{invalid_argument} for unowned pages or snapshots, for a snapshot that the
  // cache already has and for one at another length; ownership has then not changed.
  void insert(const PrefixDomain& domain, std::span<const int32_t> tokens,
              std::span<const int64_t> pages, int32_t state_slot = -1);

  // Frees least recently used leaves that only the cache holds, until `pages` allocator pages
  // became free or no such leaf is left. Returns the freed pages; their slots are now invalid
  // (unmap them from window pools). Takes O(log n) per page plus O(1) for each older leaf in use.
  // Throws Error{invalid_argument} naming a page of the cache that a caller released once too
  // often; the cache drops that page, and the next call continues.
  std::vector<int64_t> evict(int64_t pages);

  // Frees the least recently used snapshot that is not pinned. Returns false if there is none.
  bool evict_state();

  // pin() protects a prefix from eviction until it is unpinned; pins nest. It returns the number of
  // pinned tokens, those that match() would find; 0: nothing is pinned. unpin() removes one pin
  // from a prefix of `tokens` and throws Error{invalid_argument} if there is none.
  int32_t pin(const PrefixDomain& domain, std::span<const int32_t> tokens);
  void unpin(const PrefixDomain& domain, std::span<const int32_t> tokens);

  // Drops every page that is neither pinned nor in use. Returns the freed pages, as evict() does.
  std::vector<int64_t> clear();

  const PrefixCacheStats& stats() const;

 private:
  struct Tree;
  std::unique_ptr<Tree> tree_;
};

// Return the cache's keys: that of a domain, which is the parent of first pages, and that of a
// page.
PrefixKey prefix_root_key(const PrefixDomain& domain);
PrefixKey prefix_page_key(const PrefixKey& parent, std::span<const int32_t> page_tokens);

}  // namespace fovea
