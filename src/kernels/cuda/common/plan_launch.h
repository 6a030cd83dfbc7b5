// SPDX-License-Identifier: Apache-2.0
// What the launches of all plans have in common. Read by host and device code alike.
#pragma once

#include "kernels/cuda/common/attention_params.h"
#include "kernels/cuda/common/prefix_params.h"

namespace fovea::kernels::cuda {

// From one row per request of the caller's table to page ids (KV-11).
struct TableWriteParams {
  const int32_t* given;  // [rows, given_stride], slots, or pages if gives_pages
  int64_t given_stride;
  int32_t given_end;  // entries outside [0, given_end) count as page 0
  int32_t gives_pages;
  const int32_t* request_rows;  // [requests]
  const int32_t* kv_lens;       // [requests]
  const int64_t* slot_map;      // full slot -> window slot, -1: not held; or null
  // [requests, page_table_stride]; behind the end, up to a multiple of kTableKeys keys, entries
  // become 0
  int32_t* page_table;
  int64_t page_table_stride;
  int32_t requests;
  int32_t page_size;
};

// What runs beside a plan.
struct PlanCompany {
  TableWriteParams pages{};  // written by the same launch, if it has requests
  // The launch before is another plan of the same pass. Neither reads what the other writes, so
  // they run at the same time.
  bool behind_plan = false;
  // Of a cascade: what is found first, for the batch of the plan itself.
  PrefixGroupsParams prefixes{};
  // Not 0: block i of the launch plans the groups of level i, whose work list lies so many bytes
  // behind that of the level before.
  int64_t level_bytes = 0;
};

// What a plan kernel takes. The last table_blocks blocks of its grid write the page table, which
// would cost 2 us as a launch of its own; the others plan.
template <typename Plan>
struct PlanLaunch {
  Plan plan;
  PlanCompany company;
  int32_t table_blocks;  // 0: no table is written
};

}  // namespace fovea::kernels::cuda
