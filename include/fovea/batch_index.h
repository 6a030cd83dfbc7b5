// SPDX-License-Identifier: Apache-2.0
// Index arrays of a batch in the forms that attention kernels of other engines read, built on the
// host from one table of slots or pages. Fovea's own backends build what they need in plan(). Every
// buffer belongs to the caller and is host memory. Entries past the end of a request become 0, a
// valid page.
//
// All builders throw Error{invalid_argument}, before they write beyond a buffer. The error names
// the argument that is negative, absent or too small, or the request, column, value and limit of a
// used entry that breaks the page invariant or lies outside the pool.
#pragma once

#include <cstdint>
#include <span>

#include "fovea/api.h"
#include "fovea/batch.h"

namespace FOVEA_API fovea {

// Which slots of a table of slots are checked against the page invariant: the first and last of
// every page, or all of them in O(tokens).
enum class PageCheck : uint8_t { ends, every_slot };

// The tokens of lens.size() requests in a pool. Request i has lens[i] tokens; token n is in slot
// table.slot(rows[i], n), translated by slot_map if the pool has one.
struct TokenSlots {
  TokenTable table = {};               // RequestTable::table(), or a block table
  std::span<const int32_t> rows = {};  // [requests]
  std::span<const int32_t> lens = {};  // [requests]
  // [requests] first token that is read, or absent: 0. Pages that end before it count as unused:
  // their entries become 0, and they may belong to other requests by now (windows).
  std::span<const int32_t> first_tokens = {};
  std::span<const int64_t> slot_map = {};  // KvPool::slot_map()
  int32_t page_size = 1;
  int64_t pages = 0;               // pages of the pool, page 0 included
  bool reserves_page_zero = true;  // KvPool::reserves_page_zero()
  PageCheck check = PageCheck::ends;

  int32_t requests() const { return static_cast<int32_t>(lens.size()); }
};

// Builds a block table: table[i, c] = page of tokens [c * page_size, ...) of request i. The table
// is [requests, table_stride] with table_stride >= ceil(max len / page_size).
void build_page_table(const TokenSlots& tokens, int64_t table_stride, std::span<int32_t> table);

// FlashInfer's paged_kv_indptr, paged_kv_indices and paged_kv_last_page_len. The pages of request i
// are indices[indptr[i], indptr[i + 1]). Its last page holds last_page_lens[i] tokens, or 1 if the
// request has no tokens. indptr is [requests + 1], last_page_lens [requests].
struct PageIndices {
  std::span<int32_t> indptr = {};
  std::span<int32_t> indices = {};
  std::span<int32_t> last_page_lens = {};
};
void build_page_indices(const TokenSlots& tokens, const PageIndices& out);

// Builds the same with pages of 1, as SGLang passes them to its kernels: one slot per token, for
// tokens [first_tokens[i], lens[i]) of request i, at indices[indptr[i], indptr[i + 1]).
void build_slot_indices(const TokenSlots& tokens, std::span<int32_t> indptr,
                        std::span<int32_t> indices);

// Builds cumulative lengths (q_indptr, cu_seqlens): indptr[0] = 0, indptr[i + 1] = indptr[i] +
// lens[i]. The sum must fit int32.
void build_indptr(std::span<const int32_t> lens, std::span<int32_t> indptr);

}  // namespace fovea
