// SPDX-License-Identifier: Apache-2.0
// Checks of tables of slots or pages.
#pragma once

#include <algorithm>
#include <limits>
#include <string_view>

#include "core/check.h"
#include "core/strided_rows.h"
#include "fovea/batch.h"

namespace fovea {

// Throws Error{invalid_argument} naming a field that no table has.
inline void check_table(const TokenTable& table, std::string_view name) {
  check_argument(table.stride > 0, "{}.stride is {}, must be positive", name, table.stride);
  check_argument(table.rows > 0, "{}.rows is {}, must be positive", name, table.rows);
  check_argument(table.entry_tokens > 0, "{}.entry_tokens is {}, must be positive", name,
                 table.entry_tokens);
  check_aligned(table.entries, name);
  check_reach({.data = table.entries,
               .element_bytes = sizeof(int32_t),
               .row = table.stride,
               .dimensions = {{{table.rows, table.stride}}}},
              name);
}

// Returns the tokens that a row has room for, at most what fits 32 bits, as lengths do.
inline int64_t row_tokens(const TokenTable& table) {
  return std::min<int64_t>(table.stride, std::numeric_limits<int32_t>::max()) * table.entry_tokens;
}

// Returns true if a request of `length` tokens in `row` is padding: it is in row 0, the dummy of a
// RequestTable, and its last entry is 0.
inline bool is_padded(const TokenTable& table, int32_t row, int32_t length) {
  return row == 0 && length > 0 && table.entry(0, length - 1) == 0;
}

}  // namespace fovea
