// SPDX-License-Identifier: Apache-2.0
// Rows with strides given by the caller: checks how far they reach and whether they share memory.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace fovea {

// Row (i, j, k) has `row` elements and begins at element i * stride + j * stride + k * stride, with
// one stride for each of the three dimensions, which may come in any order. The stride of a
// dimension of one row is ignored. Counts are below 2^32.
struct StridedRows {
  struct Dimension {
    int64_t count = 1;
    int64_t stride = 0;  // in elements
  };

  const void* data = nullptr;
  int64_t element_bytes = 1;
  int64_t row = 0;
  std::array<Dimension, 3> dimensions = {};
};

// Throws Error{invalid_argument} naming the rows if one of their addresses does not fit 63 bits.
// After this check, arithmetic on their strides cannot overflow.
void check_reach(const StridedRows& rows, std::string_view name);

// The functions below require checked reach. Layouts are nested: a larger stride steps over
// everything that smaller strides reach.

// Returns true if no two rows share memory. Requires positive, nested strides.
bool are_disjoint(const StridedRows& rows);

// Returns true if a row of `a` shares memory with a row of `b`. Rows may interleave, for example
// values that follow the keys of each page or token. If the strides do not prove that the rows are
// disjoint, the result is true.
bool share_memory(const StridedRows& a, const StridedRows& b);

}  // namespace fovea
