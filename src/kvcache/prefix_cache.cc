// SPDX-License-Identifier: Apache-2.0
#include "fovea/prefix_cache.h"

#include <algorithm>
#include <limits>

#include "core/check.h"
#include "core/memory_error.h"
#include "kvcache/prefix_tree.h"

namespace fovea {
namespace {

constexpr const char kSearch[] = "a search for {} tokens in the prefix cache";

void check_given(std::span<const int32_t> tokens) {
  check_argument(tokens.data() != nullptr || tokens.empty(), "tokens is null, of {} entries",
                 tokens.size());
}

}  // namespace

struct PrefixCache::Tree {
  Tree(PageAllocator& page_allocator, StatePool* state_pool)
      : pages(page_allocator), state(state_pool), tree(page_allocator.page_size()) {
    if (state != nullptr) has_slot.resize(static_cast<size_t>(state->slots()));
  }

  PageAllocator& pages;
  StatePool* state;
  PrefixTree tree;
  std::vector<bool> has_slot;  // [slots of the state pool] true for a snapshot in the tree
  PrefixCacheStats stats;
  std::vector<int32_t> path;  // nodes of the last walk, without the root

  std::span<const int32_t> page_tokens(std::span<const int32_t> tokens, size_t page) const {
    const auto size = static_cast<size_t>(pages.page_size());
    return tokens.subspan(page * size, size);
  }
  int32_t tokens_in(size_t page_count) const {
    return static_cast<int32_t>(page_count) * pages.page_size();
  }

  // Sets `path` to the cached prefix of `tokens`; with linear layers, it ends at the last snapshot.
  void walk(const PrefixDomain& domain, std::span<const int32_t> tokens) {
    path.clear();
    int32_t node = tree.find_root(domain);
    const size_t full_pages = tokens.size() / static_cast<size_t>(pages.page_size());
    for (size_t i = 0; node >= 0 && i < full_pages; ++i) {
      node = tree.find_child(node, page_tokens(tokens, i));
      if (node >= 0) path.push_back(node);
    }
    if (state == nullptr) return;
    while (!path.empty() && tree.node(path.back()).state_slot < 0) path.pop_back();
  }

  // References taken here are released later, at the latest in the destructor, which must not
  // throw.
  void check_snapshot(int32_t slot) const {
    check_argument(state != nullptr, "state_slot is {}, the cache was built without a pool", slot);
    check_argument(state->in_use(slot), "state_slot is {}, must be in use in [1, {})", slot,
                   state->slots());
    check_argument(!has_slot[static_cast<size_t>(slot)],
                   "state_slot is {}, which the cache has already, of [1, {})", slot,
                   state->slots());
  }

  void add_state(int32_t node, int32_t slot) {
    tree.set_state(node, slot);
    has_slot[static_cast<size_t>(slot)] = true;
    ++stats.snapshots;
  }

  void drop_state(int32_t node) {
    const int32_t slot = tree.node(node).state_slot;
    state->release(slot);
    has_slot[static_cast<size_t>(slot)] = false;
    tree.set_state(node, -1);
    --stats.snapshots;
  }

  // Removes a leaf; the caller releases its page.
  void drop_leaf(int32_t node) {
    if (tree.node(node).state_slot >= 0) drop_state(node);
    tree.remove_leaf(node);
    --stats.pages;
  }

  void insert(const PrefixDomain& domain, std::span<const int32_t> tokens,
              std::span<const int64_t> given, int32_t state_slot);
  PrefixMatch match(const PrefixDomain& domain, std::span<const int32_t> tokens);
};

PrefixCache::PrefixCache(PageAllocator& pages, StatePool* state)
    : tree_(name_memory([&] { return std::make_unique<Tree>(pages, state); },
                        "a prefix cache over {} pages", pages.pages())) {}

// A page or slot that was released once too often has no owner any more.
PrefixCache::~PrefixCache() {
  tree_->tree.visit_all([this](const PrefixTree::Node& node) {
    if (node.page != 0 && tree_->pages.references(node.page) > 0) tree_->pages.release(node.page);
    if (node.state_slot >= 0 && tree_->state->in_use(node.state_slot)) {
      tree_->state->release(node.state_slot);
    }
  });
}

const PrefixCacheStats& PrefixCache::stats() const { return tree_->stats; }

PrefixMatch PrefixCache::match(const PrefixDomain& domain, std::span<const int32_t> tokens,
                               int32_t max_tokens) {
  check_argument(max_tokens >= 0, "max_tokens is {}, must not be negative", max_tokens);
  check_given(tokens);
  tokens = tokens.first(std::min(tokens.size(), static_cast<size_t>(max_tokens)));
  return name_memory([&] { return tree_->match(domain, tokens); }, kSearch, tokens.size());
}

PrefixMatch PrefixCache::Tree::match(const PrefixDomain& domain, std::span<const int32_t> tokens) {
  walk(domain, tokens);
  PrefixMatch match;
  match.pages.reserve(path.size());
  for (const int32_t node : path) {
    match.pages.push_back(tree.node(node).page);
    pages.check_owned(match.pages.back());
  }
  match.tokens = tokens_in(path.size());
  stats.queries += static_cast<int64_t>(tokens.size());
  stats.hits += match.tokens;
  if (path.empty()) return match;
  for (const int64_t page : match.pages) pages.retain(page);
  const int32_t last = path.back();
  tree.touch(last);
  if (state != nullptr) {
    match.state_slot = tree.node(last).state_slot;
    tree.touch_state(last);
  }
  return match;
}

void PrefixCache::insert(const PrefixDomain& domain, std::span<const int32_t> tokens,
                         std::span<const int64_t> pages, int32_t state_slot) {
  Tree& cache = *tree_;
  check_given(tokens);
  const auto page_size = static_cast<size_t>(cache.pages.page_size());
  const size_t full_pages = tokens.size() / page_size;
  check_argument(pages.data() != nullptr || pages.empty(), "pages is null, of {} entries",
                 pages.size());
  check_argument(pages.size() >= full_pages, "{} pages given, {} tokens fill {}", pages.size(),
                 tokens.size(), full_pages);
  for (const int64_t page : pages.first(full_pages)) cache.pages.check_owned(page);
  if (state_slot >= 0) {
    cache.check_snapshot(state_slot);
    check_argument(full_pages > 0 && tokens.size() % page_size == 0,
                   "a snapshot after {} tokens, must be a positive multiple of the page size {}",
                   tokens.size(), page_size);
  }
  if (full_pages == 0) return;
  name_memory([&] { cache.insert(domain, tokens, pages.first(full_pages), state_slot); },
              "a cached prefix of {} tokens", tokens.size());
}

void PrefixCache::Tree::insert(const PrefixDomain& domain, std::span<const int32_t> tokens,
                               std::span<const int64_t> given, int32_t state_slot) {
  int32_t last = -1;  // node in the tree; a collision of keys ends the walk before the last page
  int32_t node = tree.add_root(domain);
  for (size_t i = 0; node >= 0 && i < given.size(); ++i) {
    node = tree.find_child(last = node, page_tokens(tokens, i));
    if (node >= 0) continue;
    node = tree.add_child(last, page_tokens(tokens, i), given[i]);
    if (node < 0) break;
    pages.retain(given[i]);
    ++stats.pages;
  }
  if (node >= 0) last = node;
  if (last >= 0) tree.touch(last);
  if (state_slot < 0) return;
  if (node < 0 || tree.node(node).state_slot >= 0) {
    state->release(state_slot);
    if (node >= 0) tree.touch_state(node);
    return;
  }
  add_state(node, state_slot);
}

std::vector<int64_t> PrefixCache::evict(int64_t pages) {
  check_argument(pages >= 0, "pages is {}, must not be negative", pages);
  Tree& cache = *tree_;
  const PrefixTree::Order& leaves = cache.tree.leaves();
  std::vector<int64_t> freed;
  const int64_t count = std::min(pages, cache.stats.pages);
  name_memory([&] { freed.reserve(static_cast<size_t>(count)); }, "a list of {} freed pages",
              count);
  auto leaf = leaves.begin();
  while (leaf != leaves.end() && static_cast<int64_t>(freed.size()) < pages) {
    const auto [last_use, index] = *leaf;
    const int64_t page = cache.tree.node(index).page;
    const int32_t references = cache.pages.references(page);
    if (references > 1) {
      ++leaf;
      continue;
    }
    if (references == 0) {
      if (!freed.empty()) break;  // the caller gets these pages, and the next call throws the error
      cache.drop_leaf(index);
      fail(ErrorCode::invalid_argument,
           "page {} of the prefix cache is free: it was released once too often", page);
    }
    freed.push_back(page);
    cache.drop_leaf(index);
    cache.pages.release(page);
    ++cache.stats.evicted_pages;
    // The parent may have become the next leaf. It was used at the same time as this leaf or later,
    // and a use touches one path, so the search can continue from this time.
    leaf = leaves.lower_bound({last_use, 0});
  }
  return freed;
}

std::vector<int64_t> PrefixCache::clear() { return evict(std::numeric_limits<int64_t>::max()); }

bool PrefixCache::evict_state() {
  Tree& cache = *tree_;
  for (const auto& [last_use, index] : cache.tree.states()) {
    if (cache.tree.node(index).pins > 0) continue;
    cache.drop_state(index);
    return true;
  }
  return false;
}

int32_t PrefixCache::pin(const PrefixDomain& domain, std::span<const int32_t> tokens) {
  Tree& cache = *tree_;
  check_given(tokens);
  name_memory(
      [&] {
        cache.walk(domain, tokens);
        // The pages before the last one stay because they have children.
        if (!cache.path.empty()) cache.tree.pin(cache.path.back(), 1);
      },
      kSearch, tokens.size());
  return cache.tokens_in(cache.path.size());
}

void PrefixCache::unpin(const PrefixDomain& domain, std::span<const int32_t> tokens) {
  Tree& cache = *tree_;
  check_given(tokens);
  name_memory([&] { cache.walk(domain, tokens); }, kSearch, tokens.size());
  // The tree may have grown meanwhile, so the pinned node need not be the last page.
  const auto pinned =
      std::ranges::find_if(cache.path.rbegin(), cache.path.rend(),
                           [&](int32_t node) { return cache.tree.node(node).pins > 0; });
  check_argument(pinned != cache.path.rend(), "nothing of these {} tokens is pinned",
                 tokens.size());
  cache.tree.pin(*pinned, -1);
}

}  // namespace fovea
