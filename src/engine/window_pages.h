// SPDX-License-Identifier: Apache-2.0
// Which pages a window pool holds, when several requests may share a page.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "fovea/kv_cache.h"

namespace fovea {

// Counts, per page of the full pool, the requests that have it inside their window. A page that
// left the last window stays mapped, so that a cached prefix can be continued from it, until its
// room is needed; the one that left longest ago goes first.
class WindowPages {
 public:
  // pool outlives this.
  explicit WindowPages(WindowKvPool& pool);

  // One user more for each page, none of them twice. False: nothing was taken, the pool is full.
  bool hold(std::span<const int64_t> pages);
  void drop(int64_t page);    // one user less
  void forget(int64_t page);  // the full pool's page is free; it has no users
  bool mapped(int64_t page) const;
  // How much of a prefix (its pages, in order) has its last window mapped.
  int32_t usable(std::span<const int64_t> pages) const {
    return usable_window_prefix(pool_, pages);
  }
  int32_t window() const { return pool_.spec().window; }
  int64_t free_pages() const { return pool_.free_pages(); }

 private:
  // The idle pages in the order in which they left their last window: a ring through page 0, which
  // is never handed out.
  struct Links {
    int32_t before = 0, after = 0;
  };

  bool idle(int64_t page) const { return users_[static_cast<size_t>(page)] == 0 && mapped(page); }
  void append_idle(int64_t page);
  void remove_idle(int64_t page);
  Links& links(int64_t page) { return links_[static_cast<size_t>(page)]; }

  WindowKvPool& pool_;
  std::vector<int32_t> users_;  // [full pages]
  std::vector<Links> links_;    // [full pages]
  std::vector<int64_t> slots_;  // scratch
};

}  // namespace fovea
