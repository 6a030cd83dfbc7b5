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

// What makes cached KV interchangeable besides the tokens; read during a call, not kept. Each field
// is hashed with its own tag and length, so that no two fields can imitate each other.
struct PrefixDomain {
  std::string_view model = {};
  std::string_view adapter = {};
  std::string_view kv_format = {};  // dtype and scales
  std::string_view salt = {};       // isolates tenants
};

// A page's identity: SHA-256 over the parent page's key and the page's tokens, where the parent of
// a first page is a key over the domain.
using PrefixKey = std::array<uint8_t, 32>;

struct PrefixMatch {
  int32_t tokens = 0;          // multiple of the page size
  std::vector<int64_t> pages;  // tokens / page_size of them, in order; retained for the caller
  // Snapshot of the linear layers after exactly `tokens` tokens; -1 without them or without a
  // match. Not retained: copy it before the next insert or eviction.
  int32_t state_slot = -1;
};

struct PrefixCacheStats {
  int64_t queries = 0;  // tokens asked for
  int64_t hits = 0;     // tokens served
  int64_t pages = 0;    // held by the tree
  int64_t evicted_pages = 0;
  int64_t snapshots = 0;  // held by the tree
};

// Holds one reference on every page in the tree. Only full pages enter; they are never written
// again. The tokens are compared on a hit, so a hash collision costs time, never correctness. All
// calls throw Error{out_of_memory} where the system has no memory for them; then the cache holds
// what it held, after insert() perhaps the first of the offered pages too.
class PrefixCache {
 public:
  // Both outlive the cache. state: null for models without linear layers; with it, a match ends
  // where a snapshot is.
  PrefixCache(PageAllocator& pages, StatePool* state);
  ~PrefixCache();

  // The longest cached prefix, at most max_tokens long. Its pages are retained for the caller, who
  // releases them with PageAllocator::release when done; until then they cannot be evicted. They
  // are full and must not be written. A request that needs the logits of its last token asks for at
  // most tokens.size() - 1.
  PrefixMatch match(const PrefixDomain& domain, std::span<const int32_t> tokens,
                    int32_t max_tokens);

  // Offers the full pages of `tokens`; where the tree already has a page, its own stays and the
  // offered one is ignored. The caller keeps its own references. state_slot >= 0: a snapshot after
  // all `tokens` (a multiple of the page size), whose ownership moves to the cache; -1: none, and a
  // later insert may still bring one. Throws Error{invalid_argument} for pages and snapshots nobody
  // owns, a snapshot the cache has already and one at another length; then nothing has changed
  // hands.
  void insert(const PrefixDomain& domain, std::span<const int32_t> tokens,
              std::span<const int64_t> pages, int32_t state_slot = -1);

  // Frees least recently used leaves nobody else holds until `pages` allocator pages became free or
  // nothing more can go. Returns the pages freed, whose slots are then invalid (window pools: unmap
  // them). Costs O(log n) per page and a look at each leaf in use that is older. Throws
  // Error{invalid_argument} naming a page of the cache that was released once too often; the cache
  // has then forgotten it, and the next call goes on.
  std::vector<int64_t> evict(int64_t pages);

  // Frees the least recently used snapshot that is not pinned. False: there is none.
  bool evict_state();

  // Pinned prefixes are not evicted until unpinned; pins nest. Returns the tokens pinned: what
  // match would serve of `tokens`, 0 pins nothing. unpin takes back one pin on a prefix of `tokens`
  // and throws Error{invalid_argument} where there is none.
  int32_t pin(const PrefixDomain& domain, std::span<const int32_t> tokens);
  void unpin(const PrefixDomain& domain, std::span<const int32_t> tokens);

  // Drops everything not pinned and not held. Returns the pages freed, as evict() does.
  std::vector<int64_t> clear();

  const PrefixCacheStats& stats() const;

 private:
  struct Tree;
  std::unique_ptr<Tree> tree_;
};

// The keys that the cache uses: the parent of a first page's, and a page's.
PrefixKey prefix_root_key(const PrefixDomain& domain);
PrefixKey prefix_page_key(const PrefixKey& parent, std::span<const int32_t> page_tokens);

}  // namespace fovea
