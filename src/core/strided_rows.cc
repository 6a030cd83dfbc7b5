// SPDX-License-Identifier: Apache-2.0
#include "core/strided_rows.h"

#include <algorithm>
#include <limits>

#include "core/check.h"

namespace fovea {
namespace {

// The sum of three products of a count and a stride is below 2^127.
__extension__ typedef __int128 Wide;

// Rows in bytes. Strides are positive and descending; dimensions of one row are left out.
struct Pattern {
  Wide begin = 0;
  int64_t row = 0;
  std::array<StridedRows::Dimension, 3> dimensions = {};
  int size = 0;

  bool is_row() const { return size == 0; }
  StridedRows::Dimension outer() const { return dimensions[0]; }
  // Returns the pattern of one step of the outer dimension.
  Pattern inner() const {
    Pattern inner = *this;
    std::shift_left(inner.dimensions.begin(), inner.dimensions.end(), 1);
    --inner.size;
    return inner;
  }
  Wide extent() const {
    Wide bytes = row;
    for (int i = 0; i < size; ++i) bytes += Wide{dimensions[i].count - 1} * dimensions[i].stride;
    return bytes;
  }
};

Pattern pattern_of(const StridedRows& rows) {
  Pattern pattern;
  pattern.begin = static_cast<Wide>(reinterpret_cast<uintptr_t>(rows.data));
  pattern.row = rows.row * rows.element_bytes;
  for (const auto& [count, stride] : rows.dimensions) {
    if (count <= 1 || stride == 0) continue;
    const int64_t step = stride * rows.element_bytes;
    if (step < 0) pattern.begin += Wide{count - 1} * step;
    pattern.dimensions[pattern.size++] = {count, step < 0 ? -step : step};
  }
  // Absent dimensions have a stride of 0, so they come last.
  std::sort(pattern.dimensions.begin(), pattern.dimensions.end(),
            [](const auto& x, const auto& y) { return x.stride > y.stride; });
  return pattern;
}

// Returns true if b, which begins `offset` bytes after a, overlaps a. A dimension that both have
// counts as endless.
bool overlap(const Pattern& a, const Pattern& b, Wide offset) {
  if (offset >= a.extent() || offset + b.extent() <= 0) return false;
  if (a.is_row() && b.is_row()) return true;
  const int64_t step_a = a.is_row() ? 0 : a.outer().stride;
  const int64_t step_b = b.is_row() ? 0 : b.outer().stride;
  const int64_t step = std::max(step_a, step_b);
  const Pattern inner_a = step_a == step ? a.inner() : a;
  const Pattern inner_b = step_b == step ? b.inner() : b;
  // Larger patterns would need a comparison of b with more than the two nearest steps.
  if (inner_a.extent() > step || inner_b.extent() > step) return true;
  const Wide distance = ((offset % step) + step) % step;
  return overlap(inner_a, inner_b, distance) || overlap(inner_a, inner_b, distance - step);
}

}  // namespace

void check_reach(const StridedRows& rows, std::string_view name) {
  Wide first = static_cast<Wide>(reinterpret_cast<uintptr_t>(rows.data));
  Wide last = first + Wide{rows.row} * rows.element_bytes;
  for (const auto& [count, stride] : rows.dimensions) {
    if (count <= 1) continue;
    const Wide step = Wide{count - 1} * stride * rows.element_bytes;
    (step < 0 ? first : last) += step;
  }
  if (first >= 0 && last <= std::numeric_limits<int64_t>::max()) return;
  std::string strides;
  for (const auto& [count, stride] : rows.dimensions) {
    if (count > 1) strides += fmt::format("{}{} x {}", strides.empty() ? "" : ", ", count, stride);
  }
  fail(ErrorCode::invalid_argument,
       "{} at {} has rows x strides of {} elements: addresses exceed 63 bits", name, rows.data,
       strides);
}

bool are_disjoint(const StridedRows& rows) {
  std::array<StridedRows::Dimension, 3> dimensions = rows.dimensions;
  std::sort(dimensions.begin(), dimensions.end(),
            [](const auto& x, const auto& y) { return x.stride < y.stride; });
  Wide extent = rows.row;
  for (const auto& [count, stride] : dimensions) {
    if (count <= 1) continue;
    if (stride < extent) return false;
    extent += Wide{count - 1} * stride;
  }
  return true;
}

bool share_memory(const StridedRows& a, const StridedRows& b) {
  const Pattern first = pattern_of(a), second = pattern_of(b);
  return overlap(first, second, second.begin - first.begin);
}

}  // namespace fovea
