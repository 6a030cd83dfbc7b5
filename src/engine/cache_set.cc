// SPDX-License-Identifier: Apache-2.0
#include "engine/cache_set.h"

#include <algorithm>
#include <utility>

#include "core/check.h"
#include "core/rounding.h"

namespace fovea {

CacheSet::CacheSet(CacheSetOptions options)
    : options_(std::move(options)),
      pages_(options_.plan.pages, options_.page_size),
      table_(options_.max_requests + 1, options_.plan.max_context) {
  const int64_t slots = options_.plan.pages * options_.page_size;
  for (size_t g = 0; g < options_.groups.size(); ++g) {
    const CacheGroup& group = options_.groups[g];
    KvPool* pool = nullptr;
    if (group.state) {
      state_ = make_state_pool(*group.state, options_.plan.state_slots, options_.device);
      spare_states_.reserve(static_cast<size_t>(options_.plan.state_slots));
    } else if (group.kv->window > 0) {
      window_pools_.push_back(
          make_window_kv_pool(*group.kv, options_.plan.window_pages[g], slots, options_.device));
      windows_.emplace_back(*window_pools_.back());
      pool = window_pools_.back().get();
    } else {
      full_pools_.push_back(make_kv_pool(*group.kv, options_.plan.pages, options_.device));
      pool = full_pools_.back().get();
    }
    kv_.push_back(pool);
  }
  if (options_.prefix_cache) prefix_ = std::make_unique<PrefixCache>(pages_, state_.get());
}

StatePool* CacheSet::state(size_t group) const {
  return options_.groups[group].state ? state_.get() : nullptr;
}

std::optional<CacheLease> CacheSet::admit(const CachedText& text, bool reuse, int64_t spare_pages) {
  CacheLease lease;
  lease.windows.resize(windows_.size());
  const std::optional<int32_t> row = table_.allocate();
  if (!row) return std::nullopt;
  lease.row = *row;
  try {
    if (take_state(lease) && (!reuse || !prefix_ || reuse_prefix(lease, text)) &&
        grow(lease, static_cast<int32_t>(text.tokens.size()), spare_pages)) {
      return lease;
    }
  } catch (...) {
    release(lease);
    throw;
  }
  release(lease);
  return std::nullopt;
}

bool CacheSet::take_state(CacheLease& lease) {
  if (!state_) return true;
  const std::optional<int32_t> slot = allocate_state();
  lease.state_slot = slot.value_or(-1);
  return slot.has_value();
}

std::optional<int32_t> CacheSet::allocate_state() {
  if (const std::optional<int32_t> slot = state_->allocate()) return slot;
  if (!spare_states_.empty()) {
    state_->release(spare_states_.back());
    spare_states_.pop_back();
    return state_->allocate();
  }
  return prefix_ && prefix_->evict_state() ? state_->allocate() : std::nullopt;
}

bool CacheSet::hold_draft_states(CacheLease& lease, int32_t drafts) {
  if (!state_) return true;
  if (keeps_drafts()) {
    lease.kept_drafts = drafts;
    return true;
  }
  lease.draft_states.reserve(static_cast<size_t>(drafts));
  while (lease.draft_states.size() < static_cast<size_t>(drafts)) {
    std::optional<int32_t> slot;
    if (spare_states_.empty()) {
      slot = allocate_state();
    } else {
      slot = spare_states_.back();
      spare_states_.pop_back();
    }
    if (!slot) {
      release_draft_states(lease);
      return false;
    }
    lease.draft_states.push_back(*slot);
  }
  return true;
}

void CacheSet::release_draft_states(CacheLease& lease) {
  for (const int32_t slot : lease.draft_states) spare_states_.push_back(slot);
  lease.draft_states.clear();
  lease.kept_drafts = 0;
}

bool CacheSet::reuse_prefix(CacheLease& lease, const CachedText& text) {
  const PrefixMatch found = match(text);
  for (size_t i = 0; i < found.pages.size(); ++i)
    list_page(lease, static_cast<int32_t>(i), found.pages[i]);
  lease.tokens = lease.cached_tokens = found.tokens;
  if (found.tokens > 0 && state_) state_->copy(found.state_slot, lease.state_slot);
  return hold_windows(lease, found.tokens, found.tokens);
}

PrefixMatch CacheSet::match(const CachedText& text) {
  const PrefixDomain where = domain(text.salt);
  // The last token is always computed, because its logits are needed.
  auto limit = static_cast<int32_t>(text.tokens.size()) - 1;
  while (true) {
    PrefixMatch found = prefix_->match(where, text.tokens, limit);
    limit = usable(found.pages);
    if (limit == found.tokens) return found;
    for (const int64_t page : found.pages) pages_.release(page);
  }
}

int32_t CacheSet::usable(std::span<const int64_t> pages) const {
  const auto page_size = static_cast<size_t>(options_.page_size);
  size_t count = pages.size();
  for (size_t before = count + 1; count < before;) {
    before = count;
    for (const WindowPages& window : windows_)
      count = static_cast<size_t>(window.usable(pages.first(count))) / page_size;
  }
  return static_cast<int32_t>(count * page_size);
}

bool CacheSet::extend(CacheLease& lease, int32_t begin, int32_t end) {
  return grow(lease, end, 0) && hold_windows(lease, begin, end);
}

bool CacheSet::grow(CacheLease& lease, int32_t length, int64_t spare_pages) {
  if (length <= lease.tokens) return true;
  const int64_t page_size = options_.page_size;
  const int64_t needed =
      ceil_div<int64_t>(length, page_size) - ceil_div<int64_t>(lease.tokens, page_size);
  if (!make_free(needed + spare_pages)) return false;
  const std::span<int32_t> row = table_.row(lease.row);
  const auto held = static_cast<size_t>(lease.tokens);
  slots_.clear();
  if (!pages_.extend(lease.tokens, length, held > 0 ? row[held - 1] : -1, slots_)) return false;
  std::ranges::transform(slots_, row.begin() + lease.tokens,
                         [](int64_t slot) { return static_cast<int32_t>(slot); });
  table_.mark_changed(lease.row, lease.tokens);
  lease.tokens = length;
  return true;
}

bool CacheSet::make_free(int64_t pages) {
  const int64_t missing = pages - pages_.free_pages();
  if (missing > 0 && prefix_) forget(prefix_->evict(missing));
  return pages_.free_pages() >= pages;
}

bool CacheSet::hold_windows(CacheLease& lease, int32_t begin, int32_t end) {
  for (size_t w = 0; w < windows_.size(); ++w) {
    CacheLease::Pages& pages = lease.windows[w];
    const int32_t first = std::max(0, begin - windows_[w].window() + 1) / options_.page_size;
    const auto last = static_cast<int32_t>(ceil_div(int64_t{end}, options_.page_size));
    if (pages.end == 0) pages.begin = pages.end = first;
    for (; pages.begin < std::min(first, pages.end); ++pages.begin)
      windows_[w].drop(page_of(lease, pages.begin));
    held_.clear();
    for (int32_t i = pages.end; i < last; ++i) held_.push_back(page_of(lease, i));
    if (!windows_[w].hold(held_)) return false;
    pages.end = std::max(pages.end, last);
  }
  return true;
}

void CacheSet::truncate(CacheLease& lease, int32_t tokens) {
  if (!lease.draft_states.empty() && tokens < lease.tokens) {
    const auto rejected = static_cast<size_t>(lease.tokens - tokens);
    std::swap(lease.state_slot, lease.draft_states[lease.draft_states.size() - rejected]);
  }
  release_draft_states(lease);
  if (tokens >= lease.tokens) return;
  const int32_t kept = ceil_div(tokens, options_.page_size);
  const int32_t held = ceil_div(lease.tokens, options_.page_size);
  for (size_t w = 0; w < windows_.size(); ++w) {
    CacheLease::Pages& pages = lease.windows[w];
    for (; pages.end > std::max(kept, pages.begin); --pages.end)
      windows_[w].drop(page_of(lease, pages.end - 1));
  }
  for (int32_t i = kept; i < held; ++i) release_page(page_of(lease, i));
  lease.tokens = tokens;
}

void CacheSet::publish(CacheLease& lease, const CachedText& text) {
  if (!prefix_) return;
  const auto page_size = static_cast<size_t>(options_.page_size);
  const size_t full = text.tokens.size() / page_size;
  if (full == 0) return;
  held_.clear();
  for (size_t i = 0; i < full; ++i) held_.push_back(page_of(lease, static_cast<int32_t>(i)));
  int32_t snapshot = -1;
  if (state_) {
    if (full * page_size != text.tokens.size()) return;
    const std::optional<int32_t> slot = allocate_state();
    if (!slot) return;
    snapshot = *slot;
    state_->copy(lease.state_slot, snapshot);
  }
  const std::span<const int32_t> offered = text.tokens.first(full * page_size);
  try {
    prefix_->insert(domain(text.salt), offered, held_, snapshot);
  } catch (...) {
    if (snapshot >= 0) state_->release(snapshot);
    throw;
  }
  const PrefixMatch kept =
      prefix_->match(domain(text.salt), offered, static_cast<int32_t>(offered.size()));
  for (size_t i = 0; i < kept.pages.size(); ++i)
    adopt(lease, static_cast<int32_t>(i), kept.pages[i]);
}

// Replaces the lease's own copy by `page`, which is retained for the lease.
void CacheSet::adopt(CacheLease& lease, int32_t index, int64_t page) {
  const int64_t own = page_of(lease, index);
  const auto in_window = [&](size_t w) {
    return lease.windows[w].begin <= index && index < lease.windows[w].end;
  };
  bool usable = page != own;
  for (size_t w = 0; w < windows_.size(); ++w)
    usable = usable && (!in_window(w) || windows_[w].mapped(page));
  if (!usable) {
    pages_.release(page);
    return;
  }
  for (size_t w = 0; w < windows_.size(); ++w) {
    if (!in_window(w)) continue;
    windows_[w].hold({&page, 1});  // needs no space: the page is already mapped
    windows_[w].drop(own);
  }
  list_page(lease, index, page);
  release_page(own);
}

void CacheSet::release(CacheLease& lease) {
  for (size_t w = 0; w < lease.windows.size(); ++w)
    for (int32_t i = lease.windows[w].begin; i < lease.windows[w].end; ++i)
      windows_[w].drop(page_of(lease, i));
  for (int32_t position = 0; position < lease.tokens; position += options_.page_size) {
    release_page(page_of(lease, position / options_.page_size));
  }
  release_draft_states(lease);
  if (lease.state_slot >= 0) state_->release(lease.state_slot);
  if (lease.row > 0) table_.release(lease.row);
  lease = {};
}

void CacheSet::release_page(int64_t page) {
  pages_.release(page);
  if (pages_.references(page) == 0) forget({&page, 1});
}

void CacheSet::clear() {
  if (prefix_) forget(prefix_->clear());
}

void CacheSet::publish_changes(Stream stream) {
  for (const std::unique_ptr<WindowKvPool>& pool : window_pools_) pool->publish(stream);
  if (state_) state_->publish(stream);
}

void CacheSet::forget(std::span<const int64_t> pages) {
  for (WindowPages& window : windows_)
    for (const int64_t page : pages) window.forget(page);
}

int64_t CacheSet::page_of(const CacheLease& lease, int32_t index) {
  const auto position = static_cast<size_t>(index) * static_cast<size_t>(options_.page_size);
  return table_.row(lease.row)[position] / options_.page_size;
}

void CacheSet::list_page(const CacheLease& lease, int32_t index, int64_t page) {
  const std::span<int32_t> row = table_.row(lease.row);
  const int64_t first = int64_t{index} * options_.page_size;
  for (int64_t i = 0; i < options_.page_size; ++i)
    row[static_cast<size_t>(first + i)] = static_cast<int32_t>(page * options_.page_size + i);
  table_.mark_changed(lease.row, static_cast<int32_t>(first));
}

PrefixDomain CacheSet::domain(std::string_view salt) const {
  return {options_.model, {}, options_.kv_format, salt};
}

bool CacheSet::empty() const {
  const auto window_is_empty = [](const auto& pool) {
    return pool->free_pages() == pool->pages() - 1;
  };
  return pages_.free_pages() == pages_.pages() - 1 &&
         table_.available() == table_.max_requests() - 1 &&
         std::ranges::all_of(window_pools_, window_is_empty) &&
         (!state_ ||
          state_->free_slots() + static_cast<int32_t>(spare_states_.size()) == state_->slots() - 1);
}

}  // namespace fovea
