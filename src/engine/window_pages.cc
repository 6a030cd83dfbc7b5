// SPDX-License-Identifier: Apache-2.0
#include "engine/window_pages.h"

#include <algorithm>

namespace fovea {

WindowPages::WindowPages(WindowKvPool& pool) : pool_(pool) {
  const size_t pages = pool.slot_map().size() / static_cast<size_t>(pool.spec().page_size);
  users_.resize(pages);
  links_.resize(pages);
}

bool WindowPages::mapped(int64_t page) const {
  return pool_.slot_map()[static_cast<size_t>(page * pool_.spec().page_size)] >= 0;
}

bool WindowPages::hold(std::span<const int64_t> pages) {
  const int64_t page_size = pool_.spec().page_size;
  const int64_t missing = std::ranges::count_if(pages, [&](int64_t page) { return !mapped(page); });
  // Precedes all changes, so that a failed allocation leaves none.
  slots_.reserve(static_cast<size_t>(missing * page_size));
  for (const int64_t page : pages) {
    if (idle(page)) remove_idle(page);
    ++users_[static_cast<size_t>(page)];
  }
  while (pool_.free_pages() < missing && links(0).after != 0) {
    const int64_t oldest = links(0).after;
    remove_idle(oldest);
    pool_.unmap_pages({&oldest, 1});
  }
  if (pool_.free_pages() < missing) {
    for (const int64_t page : pages) drop(page);
    return false;
  }
  slots_.clear();
  for (const int64_t page : pages) {
    if (mapped(page)) continue;
    for (int64_t slot = page * page_size; slot < (page + 1) * page_size; ++slot)
      slots_.push_back(slot);
  }
  return pool_.map(slots_);
}

void WindowPages::drop(int64_t page) {
  if (--users_[static_cast<size_t>(page)] == 0 && mapped(page)) append_idle(page);
}

void WindowPages::forget(int64_t page) {
  if (!idle(page)) return;
  remove_idle(page);
  pool_.unmap_pages({&page, 1});
}

void WindowPages::append_idle(int64_t page) {
  const int32_t last = links(0).before;
  links(page) = {last, 0};
  links(last).after = static_cast<int32_t>(page);
  links(0).before = static_cast<int32_t>(page);
}

void WindowPages::remove_idle(int64_t page) {
  const Links old = links(page);
  links(old.before).after = old.after;
  links(old.after).before = old.before;
}

}  // namespace fovea
