// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdlib>
#include <utility>

#include "core/check.h"
#include "core/memory_error.h"
#include "fovea/kv_cache.h"

namespace fovea {

RequestTable::RequestTable(int32_t max_requests, int32_t max_context)
    : max_requests_(max_requests), max_context_(max_context), slots_(nullptr, std::free) {
  check_argument(max_requests >= 2, "max_requests is {}, must be at least 2: row 0 is reserved",
                 max_requests);
  check_argument(max_context >= 1, "max_context is {}, must be positive", max_context);
  const auto rows = static_cast<size_t>(max_requests);
  const auto row_bytes = static_cast<size_t>(max_context) * sizeof(int32_t);
  slots_.reset(static_cast<int32_t*>(std::calloc(rows, row_bytes)));
  if (!slots_) {
    fail(ErrorCode::out_of_memory, "the request table needs {} rows of {} bytes", rows, row_bytes);
  }
  name_memory(
      [&] {
        in_use_.resize(rows);
        changed_.assign(rows, max_context);
        free_.reserve(rows);
      },
      "a request table of {} rows", rows);
  for (int32_t row = max_requests - 1; row > 0; --row) free_.push_back(row);
}

std::optional<int32_t> RequestTable::allocate() {
  if (free_.empty()) return std::nullopt;
  const int32_t row = free_.back();
  free_.pop_back();
  in_use_[static_cast<size_t>(row)] = true;
  return row;
}

void RequestTable::release(int32_t row) {
  check_argument(row > 0 && row < max_requests_ && in_use_[static_cast<size_t>(row)],
                 "request row {} of [1, {}) is not in use", row, max_requests_);
  std::ranges::fill(this->row(row), 0);
  mark_changed(row, 0);
  in_use_[static_cast<size_t>(row)] = false;
  free_.push_back(row);
}

void RequestTable::mark_changed(int32_t row, int32_t first) {
  check_row(row);
  check_argument(first >= 0 && first <= max_context_, "first is {}, must be in [0, {}]", first,
                 max_context_);
  int32_t& changed = changed_[static_cast<size_t>(row)];
  changed = std::min(changed, first);
}

int32_t RequestTable::take_changed(int32_t row) {
  check_row(row);
  return std::exchange(changed_[static_cast<size_t>(row)], max_context_);
}

void RequestTable::check_row(int32_t row) const {
  check_argument(row >= 0 && row < max_requests_, "request row is {}, the table has {}", row,
                 max_requests_);
}

std::span<int32_t> RequestTable::row(int32_t index) {
  check_row(index);
  return {slots_.get() + int64_t{index} * max_context_, static_cast<size_t>(max_context_)};
}

}  // namespace fovea
