// SPDX-License-Identifier: Apache-2.0
// Parameters that all plan kernels share. Read by host and device code alike.
#pragma once

#include "kernels/cuda/common/attention_params.h"
#include "kernels/cuda/common/prefix_params.h"

namespace fovea::kernels::cuda {

// Turns one row per request of the caller's table into page ids.
struct TableWriteParams {
  const int32_t* given;  // [rows, given_stride], slots, or pages if gives_pages
  int64_t given_stride;
  int32_t given_end;  // entries outside [0, given_end) become page 0
  int32_t gives_pages;
  const int32_t* request_rows;  // [requests]
  const int32_t* kv_lens;       // [requests]
  const int64_t* slot_map;      // full slot -> window slot, -1: not held; or null
  // [requests, page_table_stride]; the entries after a request's last page, up to a multiple of
  // kTableKeys keys, become 0.
  int32_t* page_table;
  int64_t page_table_stride;
  int32_t requests;
  int32_t page_size;
};

// The work of a plan's launch besides planning.
struct PlanTasks {
  TableWriteParams pages{};  // the page table it writes, if there are requests
  // The preceding launch is another plan of the same pass. Neither reads what the other writes, so
  // they run at the same time.
  bool follows_plan = false;
  // A cascade: the groups it finds before it plans, for the batch of its own plan.
  PrefixGroupsParams prefixes{};
  // Not 0: block i of the launch plans the groups of level i. The work lists of two successive
  // levels lie so many bytes apart.
  int64_t level_bytes = 0;
};

// The parameters of a plan kernel. The last table_blocks blocks of its grid write the page table,
// which saves a launch; the others plan.
template <typename Plan>
struct PlanKernelParams {
  Plan plan;
  PlanTasks tasks;
  int32_t table_blocks;  // 0: no table is written
};

}  // namespace fovea::kernels::cuda
