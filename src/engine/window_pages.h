// SPDX-License-Identifier: Apache-2.0
// Tracks the pages of a window pool, which several requests may share.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "fovea/kv_cache.h"

namespace fovea {

// Counts for each page of the full pool the requests that have it inside their window. A page
// without such requests stays mapped until its memory is needed, so that a cached prefix can be
// continued from it. The page that left its last window first is reused first.
class WindowPages {
 public:
  // The pool must outlive the object.
  explicit WindowPages(WindowKvPool& pool);

  // Adds a user to each page; pages are distinct. Returns false, and changes nothing, if the pool
  // is full.
  bool hold(std::span<const int64_t> pages);
  void drop(int64_t page);    // removes a user
  void forget(int64_t page);  // the full pool's page is free and has no users
  bool mapped(int64_t page) const;
  // Returns usable_window_prefix() of a prefix, given by its pages in order.
  int32_t usable(std::span<const int64_t> pages) const {
    return usable_window_prefix(pool_, pages);
  }
  int32_t window() const { return pool_.spec().window; }
  int64_t free_pages() const { return pool_.free_pages(); }

 private:
  // Idle pages form a ring through page 0, which is never handed out, in the order in which they
  // left their last window.
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
