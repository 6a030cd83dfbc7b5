// SPDX-License-Identifier: Apache-2.0
// Index arrays of a batch, built on the host from one table of slots or pages: the forms that
// attention kernels of the field read, also those of other engines. Fovea's own backends need none
// of them from their caller. Every buffer is the caller's and host memory; entries past the end of
// a request are 0, a valid page.
//
// All builders throw Error{invalid_argument}, before they write beyond a buffer, that names what is
// negative, absent or too small, or request, column, value and limit of a used entry that breaks
// the page invariant or lies outside the pool.
#pragma once

#include <cstdint>
#include <span>

#include "fovea/batch.h"

namespace fovea {

// Which slots of a table of slots are held against the page invariant: the first and last of every
// page, or all of them (O(tokens)).
enum class PageCheck : uint8_t { ends, every_slot };

// The tokens of a batch in a pool. Request i has lens[i] tokens; token n is in slot
// table.slot(rows[i], n), translated by slot_map where the pool has one.
struct TokenSlots {
  TokenTable table = {};          // RequestTable::data(), or a block table
  const int32_t* rows = nullptr;  // [requests]
  const int32_t* lens = nullptr;  // [requests]
  // [requests] first token that is read, or null for 0. Pages that end before it count as unused:
  // their entries are 0 and they may have been given away (windows).
  const int32_t* first_tokens = nullptr;
  int32_t requests = 0;
  std::span<const int64_t> slot_map = {};  // KvPool::slot_map()
  int32_t page_size = 1;
  int64_t pages = 0;  // of the pool, page 0 included
  PageCheck check = PageCheck::ends;
};

// A block table: table[i, c] = page of tokens [c * page_size, ...) of request i. It is
// [requests, table_stride] with table_stride >= ceil(max len / page_size).
void build_page_table(const TokenSlots& tokens, int64_t table_stride, std::span<int32_t> table);

// What FlashInfer calls paged_kv_indptr, paged_kv_indices and paged_kv_last_page_len: the pages of
// request i are indices[indptr[i], indptr[i + 1]); its last page holds last_page_lens[i] tokens, 1
// when it has none. indptr is [requests + 1], last_page_lens [requests].
struct PageIndices {
  std::span<int32_t> indptr = {};
  std::span<int32_t> indices = {};
  std::span<int32_t> last_page_lens = {};
};
void build_page_indices(const TokenSlots& tokens, const PageIndices& out);

// The same with pages of 1, as SGLang gives them to its kernels: one slot per token, tokens
// [first_tokens[i], lens[i]) of request i, at indices[indptr[i], indptr[i + 1]).
void build_slot_indices(const TokenSlots& tokens, std::span<int32_t> indptr,
                        std::span<int32_t> indices);

// Cumulative lengths (q_indptr, cu_seqlens): indptr[0] = 0, indptr[i + 1] = indptr[i] + lens[i].
// Error when the sum exceeds int32.
void build_indptr(std::span<const int32_t> lens, std::span<int32_t> indptr);

}  // namespace fovea
