// SPDX-License-Identifier: Apache-2.0
#include <limits>

#include "core/check.h"
#include "core/memory_error.h"
#include "core/rounding.h"
#include "fovea/kv_cache.h"

namespace fovea {

PageAllocator::PageAllocator(int64_t pages, int32_t page_size) : page_size_(page_size) {
  check_argument(page_size >= 1, "page_size is {}, must be positive", page_size);
  const int64_t limit = std::numeric_limits<int32_t>::max() / page_size;
  check_argument(pages >= 2 && pages <= limit,
                 "pages is {}, must be in [2, {}] with a page_size of {}", pages, limit, page_size);
  name_memory(
      [&] {
        references_.resize(static_cast<size_t>(pages));
        free_.reserve(static_cast<size_t>(pages) - 1);
      },
      "a page allocator of {} pages", pages);
  for (int64_t page = pages - 1; page > 0; --page) free_.push_back(page);
}

int32_t PageAllocator::references(int64_t page) const {
  check_argument(page >= 0 && page < pages(), "page {} is outside [0, {})", page, pages());
  return references_[static_cast<size_t>(page)];
}

void PageAllocator::check_owned(int64_t page) const {
  check_argument(page >= 1 && page < pages(), "page {} is outside [1, {})", page, pages());
  check_argument(references(page) > 0, "page {} is free: it was released before", page);
}

bool PageAllocator::extend(int32_t prefix, int32_t length, int64_t last_slot,
                           std::vector<int64_t>& slots) {
  check_argument(prefix >= 0 && length >= prefix, "cannot extend from {} to {} tokens", prefix,
                 length);
  const int32_t in_tail = prefix % page_size_;
  int64_t slot = 0;
  if (in_tail > 0) {
    check_argument(last_slot % page_size_ == in_tail - 1,
                   "last_slot is {}, its place in a page of {} is not that of token {}", last_slot,
                   page_size_, prefix - 1);
    const int64_t tail = last_slot / page_size_;
    check_owned(tail);
    check_argument(references(tail) == 1, "page {} has {} owners and cannot be written", tail,
                   references(tail));
    slot = last_slot + 1;
  }
  // 64 bits, because length + page_size may exceed int32.
  const int64_t new_pages =
      ceil_div(int64_t{length}, page_size_) - ceil_div(int64_t{prefix}, page_size_);
  if (new_pages > free_pages()) return false;

  size_t at = slots.size();
  name_memory([&] { slots.resize(at + static_cast<size_t>(length - prefix)); },
              "the slots of {} new tokens", length - prefix);
  for (int32_t position = prefix; position < length; ++position) {
    if (position % page_size_ == 0) {
      const int64_t page = free_.back();
      free_.pop_back();
      references_[static_cast<size_t>(page)] = 1;
      slot = page * page_size_;
    }
    slots[at++] = slot++;
  }
  return true;
}

bool PageAllocator::allocate(int64_t count, std::vector<int64_t>& pages) {
  check_argument(count >= 0, "count is {}, must not be negative", count);
  if (count > free_pages()) return false;
  name_memory([&] { pages.reserve(pages.size() + static_cast<size_t>(count)); },
              "a list of {} pages", count);
  for (int64_t i = 0; i < count; ++i) {
    pages.push_back(free_.back());
    references_[static_cast<size_t>(free_.back())] = 1;
    free_.pop_back();
  }
  return true;
}

void PageAllocator::retain(int64_t page) {
  check_owned(page);
  ++references_[static_cast<size_t>(page)];
}

void PageAllocator::release(int64_t page) {
  check_owned(page);
  if (--references_[static_cast<size_t>(page)] == 0) free_.push_back(page);
}

void PageAllocator::release_slots(std::span<const int32_t> slots) {
  // Tokens are consecutive: the next page begins where the slots of this one end.
  for (size_t i = 0; i < slots.size();) {
    const int32_t slot = slots[i];
    release(slot / page_size_);
    i += static_cast<size_t>(page_size_ - slot % page_size_);
  }
}

void PageAllocator::truncate(std::span<const int32_t> slots, int32_t length) {
  check_argument(length >= 0 && static_cast<size_t>(length) <= slots.size(),
                 "cannot truncate {} tokens to {}", slots.size(), length);
  const auto page_size = static_cast<size_t>(page_size_);
  const size_t kept = round_up(static_cast<size_t>(length), page_size);
  if (kept < slots.size()) release_slots(slots.subspan(kept));
}

}  // namespace fovea
