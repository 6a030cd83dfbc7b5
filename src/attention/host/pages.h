// SPDX-License-Identifier: Apache-2.0
// The page table of one batch, in a workspace.
#pragma once

#include <cstdint>

#include "core/workspace_carver.h"
#include "fovea/attention_spec.h"
#include "fovea/batch.h"
#include "fovea/kv_cache.h"

namespace fovea {

struct PageTable {
  int32_t* table = nullptr;  // [max_requests, stride]
  int64_t stride = 0;
  int32_t* first_keys = nullptr;  // [max_requests]
};

PageTable carve_page_table(WorkspaceCarver& workspace, const BatchLimits& limits,
                           int32_t page_size);

// Fills `pages` for the batch; scope cross takes the encoder's table.
void build_batch_pages(const BatchView& batch, const AttentionSpec& spec, const KvPool& pool,
                       const PageTable& pages);

}  // namespace fovea
