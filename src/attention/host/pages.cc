// SPDX-License-Identifier: Apache-2.0
#include "attention/host/pages.h"

#include "attention/validate/batch.h"
#include "core/rounding.h"
#include "fovea/batch_index.h"

namespace fovea {

PageTable carve_page_table(WorkspaceCarver& workspace, const BatchLimits& limits,
                           int32_t page_size) {
  PageTable pages;
  pages.stride = ceil_div(int64_t{limits.max_kv_len}, page_size);
  pages.table = workspace.take<int32_t>(limits.max_requests * pages.stride);
  pages.first_keys = workspace.take<int32_t>(limits.max_requests);
  return pages;
}

void build_batch_pages(const BatchView& batch, const AttentionSpec& spec, const KvPool& pool,
                       const PageTable& pages) {
  TokenSlots tokens;
  const auto requests = static_cast<size_t>(batch.requests);
  tokens.rows = batch.request_rows.first(requests);
  tokens.slot_map = pool.slot_map();
  tokens.page_size = pool.spec().page_size;
  tokens.table = key_table(batch, spec.scope);
  tokens.pages = pool.pages();
  tokens.reserves_page_zero = pool.reserves_page_zero();
  tokens.check = PageCheck::every_slot;
  if (spec.scope == AttentionScope::cross) {
    tokens.lens = batch.cross.lens.first(requests);
  } else {
    find_first_keys(batch, spec, pages.first_keys);
    tokens.lens = batch.kv_lens.first(requests);
    tokens.first_tokens = {pages.first_keys, requests};
  }
  const auto entries = static_cast<size_t>(batch.requests * pages.stride);
  build_page_table(tokens, pages.stride, {pages.table, entries});
}

}  // namespace fovea
