// SPDX-License-Identifier: Apache-2.0
// Finds the pages that hold the keys and values of a token prefix. Include fovea/fovea.h.
#ifndef FOVEA_C_PREFIX_CACHE_H_
#define FOVEA_C_PREFIX_CACHE_H_

#include "fovea/c/storage.h"

#ifdef __cplusplus
extern "C" {
#endif

// Tokens, and the conditions under which their cached keys can be reused: prefixes with different
// texts never share pages. A NULL text is empty.
typedef struct fovea_prefix {
  uint32_t struct_size;
  int32_t reserved;  // 0
  const char* model;
  const char* adapter;
  const char* kv_format;  // dtype and scales
  const char* salt;       // isolates tenants
  const int32_t* tokens;
  size_t token_count;
} fovea_prefix;
FOVEA_C_API fovea_status fovea_prefix_init(fovea_prefix* prefix, size_t struct_size);

typedef struct fovea_prefix_match {
  uint32_t struct_size;
  int32_t tokens;  // a multiple of the page size
  // Snapshot of the linear layers after `tokens` tokens; -1: none. Copy it before the next insert
  // or eviction.
  int32_t state_slot;
  int32_t reserved;  // 0
  // Receives the tokens / page_size pages in order, which are retained for the caller. Set it to an
  // array of page_capacity pages; max_tokens / page_size are enough.
  int64_t* pages;
  size_t page_capacity;
} fovea_prefix_match;
FOVEA_C_API fovea_status fovea_prefix_match_init(fovea_prefix_match* match, size_t struct_size);

typedef struct fovea_prefix_cache_stats {
  uint32_t struct_size;
  int32_t reserved;
  int64_t queries;  // tokens looked up
  int64_t hits;     // tokens found
  int64_t pages;    // pages in the tree
  int64_t evicted_pages;
  int64_t snapshots;  // snapshots in the tree
} fovea_prefix_cache_stats;
FOVEA_C_API fovea_status fovea_prefix_cache_stats_init(fovea_prefix_cache_stats* stats,
                                                       size_t struct_size);

// A tree of full pages. It holds a reference on every page in it; such pages are never written
// again.
typedef struct fovea_prefix_cache fovea_prefix_cache;
// `states` is NULL for models without linear layers.
FOVEA_C_API fovea_status fovea_prefix_cache_create(fovea_page_allocator* allocator,
                                                   fovea_state_pool* states,
                                                   fovea_prefix_cache** cache);
FOVEA_C_API fovea_status fovea_prefix_cache_destroy(fovea_prefix_cache* cache);

// Gives the longest cached prefix of at most max_tokens tokens. Release its pages by
// fovea_page_allocator_release().
FOVEA_C_API fovea_status fovea_prefix_cache_match(fovea_prefix_cache* cache,
                                                  const fovea_prefix* prefix, int32_t max_tokens,
                                                  fovea_prefix_match* match);
// Adds the full pages of the prefix. The caller keeps its own references. state_slot >= 0: a
// snapshot after all tokens, which the cache then owns; -1: none.
FOVEA_C_API fovea_status fovea_prefix_cache_insert(fovea_prefix_cache* cache,
                                                   const fovea_prefix* prefix, const int64_t* pages,
                                                   size_t page_count, int32_t state_slot);
// Frees least recently used pages that only the cache holds, up to `pages`. Writes the freed pages
// to `freed` [pages] and their number to *count. `freed` may be NULL.
FOVEA_C_API fovea_status fovea_prefix_cache_evict(fovea_prefix_cache* cache, int64_t pages,
                                                  int64_t* freed, size_t* count);
// Frees the least recently used snapshot that is not pinned. *evicted is 0 if there is none.
FOVEA_C_API fovea_status fovea_prefix_cache_evict_state(fovea_prefix_cache* cache,
                                                        int32_t* evicted);
// Protects a prefix from eviction; pins nest. *tokens is the number of pinned tokens.
FOVEA_C_API fovea_status fovea_prefix_cache_pin(fovea_prefix_cache* cache,
                                                const fovea_prefix* prefix, int32_t* tokens);
// Removes one pin from the first `tokens` tokens of the prefix, as fovea_prefix_cache_pin() gave
// them.
FOVEA_C_API fovea_status fovea_prefix_cache_unpin(fovea_prefix_cache* cache,
                                                  const fovea_prefix* prefix);
// Drops every page that is neither pinned nor in use. `freed` is NULL or has room for all pages of
// the cache (fovea_prefix_cache_stats); *count is its capacity, then the number of freed pages.
FOVEA_C_API fovea_status fovea_prefix_cache_clear(fovea_prefix_cache* cache, int64_t* freed,
                                                  size_t* count);
FOVEA_C_API fovea_status fovea_prefix_cache_get_stats(const fovea_prefix_cache* cache,
                                                      fovea_prefix_cache_stats* stats);

#ifdef __cplusplus
}
#endif

#endif  // FOVEA_C_PREFIX_CACHE_H_
