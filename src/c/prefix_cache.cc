// SPDX-License-Identifier: Apache-2.0
#include "fovea/prefix_cache.h"

#include <algorithm>

#include "c/handles.h"

namespace fovea::c {
namespace {

constexpr fovea_prefix kDefaultPrefix = {.struct_size = sizeof(fovea_prefix)};
constexpr fovea_prefix_match kDefaultMatch = {.struct_size = sizeof(fovea_prefix_match),
                                              .state_slot = -1};
constexpr fovea_prefix_cache_stats kDefaultStats = {.struct_size =
                                                        sizeof(fovea_prefix_cache_stats)};

// A prefix of the caller.
struct Prefix {
  explicit Prefix(const fovea_prefix* prefix) {
    const fovea_prefix from = read_struct(prefix, kDefaultPrefix, "prefix");
    check_reserved(from.reserved, "prefix.reserved");
    domain = {text_or_empty(from.model), text_or_empty(from.adapter), text_or_empty(from.kv_format),
              text_or_empty(from.salt)};
    tokens = entries(from.tokens, from.token_count, "prefix.tokens");
  }

  PrefixDomain domain;
  std::span<const int32_t> tokens;
};

PrefixCache& cache_of(const fovea_prefix_cache* cache) { return *need(cache, "cache").object; }

// The pages of a match are retained, so there must be room for them before the search.
void match(const fovea_prefix_cache& cache, const Prefix& prefix, int32_t max_tokens,
           fovea_prefix_match* out) {
  const fovea_prefix_match given = read_struct(out, kDefaultMatch, "match");
  check(max_tokens >= 0, "max_tokens is {}, must not be negative", max_tokens);
  const auto page_size = static_cast<size_t>(cache.pages->page_size());
  const size_t room = std::min(prefix.tokens.size(), static_cast<size_t>(max_tokens)) / page_size;
  entries(given.pages, given.page_capacity, "match.pages");
  check(given.page_capacity >= room, "match.page_capacity is {}, needs {}", given.page_capacity,
        room);
  const PrefixMatch found = cache.object->match(prefix.domain, prefix.tokens, max_tokens);
  fovea_prefix_match result = given;
  result.tokens = found.tokens;
  result.state_slot = found.state_slot;
  std::ranges::copy(found.pages, given.pages);
  write_struct(out, result, "match");
}

void give_freed(const std::vector<int64_t>& pages, int64_t* freed, size_t* count) {
  if (freed != nullptr) std::ranges::copy(pages, freed);
  *count = pages.size();
}

}  // namespace
}  // namespace fovea::c

using namespace fovea::c;  // NOLINT: the functions below are those of the C header

fovea_status fovea_prefix_init(fovea_prefix* prefix, size_t struct_size) {
  return init_struct(prefix, struct_size, kDefaultPrefix, "prefix");
}

fovea_status fovea_prefix_match_init(fovea_prefix_match* match, size_t struct_size) {
  return init_struct(match, struct_size, kDefaultMatch, "match");
}

fovea_status fovea_prefix_cache_stats_init(fovea_prefix_cache_stats* stats, size_t struct_size) {
  return init_struct(stats, struct_size, kDefaultStats, "stats");
}

fovea_status fovea_prefix_cache_create(fovea_page_allocator* allocator, fovea_state_pool* states,
                                       fovea_prefix_cache** cache) {
  return guarded([&] {
    clear_handle(cache, "cache");
    auto made = std::make_unique<fovea_prefix_cache>();
    made->pages = need(allocator, "allocator").object;
    if (states != nullptr) made->states = need(states, "states").object;
    made->object = std::make_unique<fovea::PrefixCache>(*made->pages, made->states.get());
    give_handle(std::move(made), cache);
  });
}

fovea_status fovea_prefix_cache_destroy(fovea_prefix_cache* cache) {
  return destroy_handle(cache, "cache");
}

fovea_status fovea_prefix_cache_match(fovea_prefix_cache* cache, const fovea_prefix* prefix,
                                      int32_t max_tokens, fovea_prefix_match* match) {
  return guarded([&] {
    const fovea_prefix_cache& given = need(cache, "cache");
    fovea::c::match(given, Prefix(prefix), max_tokens, match);
  });
}

fovea_status fovea_prefix_cache_insert(fovea_prefix_cache* cache, const fovea_prefix* prefix,
                                       const int64_t* pages, size_t page_count,
                                       int32_t state_slot) {
  return guarded([&] {
    fovea::PrefixCache& tree = cache_of(cache);
    const Prefix given(prefix);
    check(state_slot >= -1, "state_slot is {}, must be at least -1", state_slot);
    tree.insert(given.domain, given.tokens, entries(pages, page_count, "pages"), state_slot);
  });
}

fovea_status fovea_prefix_cache_evict(fovea_prefix_cache* cache, int64_t pages, int64_t* freed,
                                      size_t* count) {
  return guarded([&] {
    fovea::PrefixCache& tree = cache_of(cache);
    set(count, 0, "count");
    check_alignment(freed, alignof(int64_t), "freed");
    give_freed(tree.evict(pages), freed, count);
  });
}

fovea_status fovea_prefix_cache_evict_state(fovea_prefix_cache* cache, int32_t* evicted) {
  return guarded([&] {
    fovea::PrefixCache& tree = cache_of(cache);
    set(evicted, 0, "evicted");
    *evicted = tree.evict_state() ? 1 : 0;
  });
}

fovea_status fovea_prefix_cache_pin(fovea_prefix_cache* cache, const fovea_prefix* prefix,
                                    int32_t* tokens) {
  return guarded([&] {
    fovea::PrefixCache& tree = cache_of(cache);
    const Prefix given(prefix);
    set(tokens, 0, "tokens");
    *tokens = tree.pin(given.domain, given.tokens);
  });
}

fovea_status fovea_prefix_cache_unpin(fovea_prefix_cache* cache, const fovea_prefix* prefix) {
  return guarded([&] {
    fovea::PrefixCache& tree = cache_of(cache);
    const Prefix given(prefix);
    tree.unpin(given.domain, given.tokens);
  });
}

fovea_status fovea_prefix_cache_clear(fovea_prefix_cache* cache, int64_t* freed, size_t* count) {
  return guarded([&] {
    fovea::PrefixCache& tree = cache_of(cache);
    check_pointer(count, "count");
    check_alignment(count, alignof(size_t), "count");
    const auto max_pages = static_cast<size_t>(tree.stats().pages);
    check(freed == nullptr || *count >= max_pages, "freed has room for {}, the cache has {} pages",
          *count, max_pages);
    check_alignment(freed, alignof(int64_t), "freed");
    give_freed(tree.clear(), freed, count);
  });
}

fovea_status fovea_prefix_cache_get_stats(const fovea_prefix_cache* cache,
                                          fovea_prefix_cache_stats* stats) {
  return guarded([&] {
    const fovea::PrefixCacheStats& from = cache_of(cache).stats();
    fovea_prefix_cache_stats to = kDefaultStats;
    to.queries = from.queries;
    to.hits = from.hits;
    to.pages = from.pages;
    to.evicted_pages = from.evicted_pages;
    to.snapshots = from.snapshots;
    write_struct(stats, to, "stats");
  });
}
