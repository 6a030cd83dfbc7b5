// SPDX-License-Identifier: Apache-2.0
// Rows that a caller laid out with strides: how far they reach, and whether they share memory.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace fovea {

// Row (i, j, k) has `row` elements and begins at element i * stride + j * stride + k * stride, with
// the strides of the three dimensions in any order. A dimension of one row has no stride that
// matters. Counts are below 2^32.
struct StridedRows {
  struct Dimension {
    int64_t count = 1;
    int64_t stride = 0;  // elements
  };

  const void* data = nullptr;
  int64_t element_bytes = 1;
  int64_t row = 0;
  std::array<Dimension, 3> dimensions = {};
};

// Throws Error{invalid_argument} naming the rows where an address of theirs does not fit 63 bits.
// So nothing that is computed from their strides overflows.
void check_reach(const StridedRows& rows, std::string_view name);

// The two below are for rows whose reach was checked. Layouts are nested: a larger stride steps
// over everything that smaller strides reach.

// Whether no two rows share memory: strides are positive and nested.
bool are_apart(const StridedRows& rows);

// Whether a row of `a` and a row of `b` share memory. Rows may lie between each other (values
// behind the keys of each page or token); where the strides of the two do not tell that they are
// apart, they count as sharing.
bool share_memory(const StridedRows& a, const StridedRows& b);

}  // namespace fovea
