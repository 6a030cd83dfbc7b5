// SPDX-License-Identifier: Apache-2.0
#include "fovea/batch_index.h"

#include <algorithm>
#include <limits>

#include "attention/token_table.h"
#include "core/check.h"
#include "core/checked_math.h"
#include "core/rounding.h"

namespace fovea {
namespace {

int32_t pages_of(const TokenSlots& tokens, int32_t request) {
  return static_cast<int32_t>(ceil_div(int64_t{tokens.lens[request]}, tokens.page_size));
}

int32_t first_token(const TokenSlots& tokens, int32_t request) {
  return !tokens.first_tokens.empty() ? tokens.first_tokens[request] : 0;
}

int64_t slot_of(const TokenSlots& tokens, int32_t request, int64_t token) {
  return tokens.table.slot(tokens.rows[request], token);
}

// Returns the slot in the pool of a token of the table.
int64_t pool_slot(const TokenSlots& tokens, int32_t request, int64_t token) {
  const int64_t slot = slot_of(tokens, request, token);
  if (tokens.slot_map.empty()) return slot;
  const auto mapped = static_cast<int64_t>(tokens.slot_map.size());
  check_argument(slot >= 0 && slot < mapped,
                 "request {}, token {}: slot {} is outside [0, {}), the slots of the full pool",
                 request, token, slot, mapped);
  const int64_t here = tokens.slot_map[static_cast<size_t>(slot)];
  check_argument(here >= 0, "request {}, token {}: slot {} has left the window pool", request,
                 token, slot);
  return here;
}

bool is_padding(const TokenSlots& tokens, int32_t request) {
  return tokens.reserves_page_zero &&
         is_padded(tokens.table, tokens.rows[request], tokens.lens[request]);
}

// Checks that a table of pages names a page of the pool for the token.
void check_page(const TokenSlots& tokens, int32_t request, int64_t token) {
  const auto mapped = static_cast<int64_t>(tokens.slot_map.size());
  const int64_t pages = mapped > 0 ? mapped / tokens.page_size : tokens.pages;
  const int32_t page = tokens.table.entry(tokens.rows[request], token);
  check_argument(page >= 0 && page < pages, "request {}, column {}: page {} is outside [0, {})",
                 request, token / tokens.page_size, page, pages);
}

// Checks that slot - token is the same for all tokens of a page.
void check_same_page(const TokenSlots& tokens, int32_t request, int64_t begin, int64_t end) {
  const int32_t* row = tokens.table.entries + tokens.rows[request] * tokens.table.stride;
  const int64_t base = row[end - 1] - (end - 1);
  const int64_t step = tokens.check == PageCheck::ends ? std::max<int64_t>(end - 1 - begin, 1) : 1;
  for (int64_t token = begin; token < end; token += step) {
    check_argument(row[token] - token == base,
                   "request {}, column {}: slot {} of token {} and slot {} of token {} are not in "
                   "one page of {} slots",
                   request, token / tokens.page_size, row[token], token, row[end - 1], end - 1,
                   tokens.page_size);
  }
}

// Returns the page of a column, found from its last token: a window pool that has unmapped the
// first tokens of a page still has the last.
int32_t page_at(const TokenSlots& tokens, int32_t request, int32_t column) {
  const int64_t begin = int64_t{column} * tokens.page_size;
  const int64_t end = std::min<int64_t>(begin + tokens.page_size, tokens.lens[request]);
  if (end <= first_token(tokens, request)) return 0;
  if (is_padding(tokens, request)) {
    const int32_t entry = tokens.table.entry(0, end - 1);
    check_argument(entry == 0,
                   "request {}, column {}: the entry of token {} is {}, but that of its last token "
                   "is 0, which makes the request padding",
                   request, column, end - 1, entry);
    return 0;
  }
  if (tokens.table.entry_tokens > 1) {
    check_page(tokens, request, end - 1);
  } else {
    check_same_page(tokens, request, begin, end);
  }
  const int64_t slot = pool_slot(tokens, request, end - 1);
  const int64_t page = slot / tokens.page_size;
  check_argument(slot >= 0 && page < tokens.pages,
                 "request {}, column {}: slot {} is in page {}, outside the pool of {} pages",
                 request, column, slot, page, tokens.pages);
  check_argument(
      page > 0 || !tokens.reserves_page_zero,
      "request {}, column {}: token {} has no page (slot {} is padding's), its length {} "
      "exceeds the pages it owns",
      request, column, end - 1, slot, tokens.lens[request]);
  check_argument(slot % tokens.page_size == (end - 1) % tokens.page_size,
                 "request {}, column {}: slot {} of token {} breaks slot % {} == token % {}",
                 request, column, slot, end - 1, tokens.page_size, tokens.page_size);
  return static_cast<int32_t>(page);
}

int32_t next_indptr(int64_t total) {
  check_argument(total <= std::numeric_limits<int32_t>::max(),
                 "the indices of the batch number {}, at most {}", total,
                 std::numeric_limits<int32_t>::max());
  return static_cast<int32_t>(total);
}

void check_room(std::string_view name, std::span<const int32_t> room, int64_t needed) {
  check_argument(static_cast<int64_t>(room.size()) >= needed, "{} holds {} entries, needs {}", name,
                 room.size(), needed);
  check_argument(room.data() != nullptr || room.empty(), "{} is null, of {} entries", name,
                 room.size());
}

void check_tokens(const TokenSlots& tokens) {
  const size_t requests = tokens.lens.size();
  check_argument(requests < std::numeric_limits<int32_t>::max(), "lens has {} requests, at most {}",
                 requests, std::numeric_limits<int32_t>::max() - 1);
  check_argument(tokens.page_size >= 1, "page_size is {}, must be at least 1", tokens.page_size);
  const int32_t max_pages = std::numeric_limits<int32_t>::max() / tokens.page_size;
  check_argument(tokens.pages >= 0 && tokens.pages <= max_pages,
                 "pages is {}, must be in [0, {}] with a page_size of {}: slots are 32-bit",
                 tokens.pages, max_pages, tokens.page_size);
  if (tokens.requests() == 0) return;
  check_argument(tokens.table.entries != nullptr, "table.entries is null");
  check_argument(tokens.rows.size() >= requests, "rows has {} elements, lens has {}",
                 tokens.rows.size(), requests);
  check_argument(tokens.first_tokens.empty() || tokens.first_tokens.size() >= requests,
                 "first_tokens has {} elements, lens has {}", tokens.first_tokens.size(), requests);
  check_table(tokens.table, "table");
  check_enum(tokens.check, PageCheck::every_slot, "check", "PageCheck");
  const int64_t room = row_tokens(tokens.table);
  for (int32_t request = 0; request < tokens.requests(); ++request) {
    const int32_t len = tokens.lens[request];
    const int32_t row = tokens.rows[request];
    check_argument(row >= 0 && row < tokens.table.rows,
                   "rows[{}] is {}, must be in [0, {}), the rows of the table", request, row,
                   tokens.table.rows);
    check_argument(len >= 0 && len <= room,
                   "lens[{}] is {}, must be in [0, {}], a row of the table", request, len, room);
    check_argument(first_token(tokens, request) >= 0,
                   "first_tokens[{}] is {}, must not be negative", request,
                   first_token(tokens, request));
  }
}

}  // namespace

void build_page_table(const TokenSlots& tokens, int64_t table_stride, std::span<int32_t> table) {
  check_tokens(tokens);
  check_argument(table_stride >= 0, "table_stride is {}, must not be negative", table_stride);
  check_room("table", table,
             checked_product("requests * table_stride", {tokens.requests(), table_stride}));
  for (int32_t request = 0; request < tokens.requests(); ++request) {
    const int32_t columns = pages_of(tokens, request);
    check_argument(columns <= table_stride, "request {}: {} pages exceed the table's {} columns",
                   request, columns, table_stride);
    int32_t* row = table.data() + request * table_stride;
    for (int32_t column = 0; column < columns; ++column) {
      row[column] = page_at(tokens, request, column);
    }
    std::fill(row + columns, row + table_stride, 0);
  }
}

void build_page_indices(const TokenSlots& tokens, const PageIndices& out) {
  check_tokens(tokens);
  check_room("indptr", out.indptr, int64_t{tokens.requests()} + 1);
  check_room("last_page_lens", out.last_page_lens, tokens.requests());
  int64_t total = 0;
  out.indptr[0] = 0;
  for (int32_t request = 0; request < tokens.requests(); ++request) {
    const int32_t columns = pages_of(tokens, request);
    check_room("indices", out.indices, total + columns);
    for (int32_t column = 0; column < columns; ++column) {
      out.indices[static_cast<size_t>(total + column)] = page_at(tokens, request, column);
    }
    total += columns;
    out.indptr[static_cast<size_t>(request) + 1] = next_indptr(total);
    out.last_page_lens[static_cast<size_t>(request)] =
        columns == 0 ? 1 : tokens.lens[request] - (columns - 1) * tokens.page_size;
  }
}

void build_slot_indices(const TokenSlots& tokens, std::span<int32_t> indptr,
                        std::span<int32_t> indices) {
  check_tokens(tokens);
  check_room("indptr", indptr, int64_t{tokens.requests()} + 1);
  const int64_t slots = tokens.pages * tokens.page_size;
  int64_t total = 0;
  indptr[0] = 0;
  for (int32_t request = 0; request < tokens.requests(); ++request) {
    const int32_t first = first_token(tokens, request);
    const int32_t end = tokens.lens[request];
    const bool padding = is_padding(tokens, request);
    check_room("indices", indices, total + std::max(end - first, 0));
    for (int32_t token = first; token < end; ++token) {
      const int64_t slot = pool_slot(tokens, request, token);
      const int64_t first_slot = padding ? 0 : tokens.page_size;
      check_argument(slot >= first_slot && slot < slots,
                     "request {}, token {}: slot {} is outside [{}, {})", request, token, slot,
                     first_slot, slots);
      indices[static_cast<size_t>(total++)] = static_cast<int32_t>(slot);
    }
    indptr[static_cast<size_t>(request) + 1] = next_indptr(total);
  }
}

void build_indptr(std::span<const int32_t> lens, std::span<int32_t> indptr) {
  check_room("indptr", indptr, static_cast<int64_t>(lens.size()) + 1);
  int64_t total = 0;
  indptr[0] = 0;
  for (size_t i = 0; i < lens.size(); ++i) {
    check_argument(lens[i] >= 0, "lens[{}] is {}, must not be negative", i, lens[i]);
    total += lens[i];
    indptr[i + 1] = next_indptr(total);
  }
}

}  // namespace fovea
