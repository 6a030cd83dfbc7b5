// SPDX-License-Identifier: Apache-2.0
// What every plan's launch does: wait, plan, and write the page table. Reads one slot a page, of its last
// token: where a window pool has forgotten the first tokens of a page, it still has the last.
#pragma once

#include "kernels/cuda/common/plan_launch.h"
#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/common/types.cuh"

namespace fovea::kernels::cuda {

// Nothing wild is followed: what names no slot of the pool becomes page 0.
__device__ inline int32_t page_of(const PageTableParams& params, int64_t slot) {
  if (slot < 0 || slot >= params.slots) return 0;
  if (params.slot_map) slot = max(params.slot_map[slot], 0ll);
  return static_cast<int32_t>(slot) / params.page_size;
}

// Pages of 1 are slots: many to read, and nothing to look up.
__device__ inline void write_slots(const PageTableParams& params, const int32_t* slots, int pages, int entries,
                                   int32_t* row, int first, int step) {
#pragma unroll 16
  for (int page = first; page < entries; page += step) {
    const int slot = page < pages ? slots[page] : 0;
    row[page] = slot >= 0 && slot < params.slots ? slot : 0;
  }
}

// The row of a request, by threads `first`, `first + step`, ...
__device__ inline void write_page_row(const PageTableParams& params, int64_t request, int first, int step) {
  const int64_t size = params.page_size;
  const int64_t kv_len = min(static_cast<int64_t>(params.kv_lens[request]), params.page_table_stride * size);
  const int32_t* slots = params.request_slots + params.request_rows[request] * params.request_slots_stride;
  const int pages = static_cast<int>((kv_len + size - 1) / size);
  const int64_t padded = ((kv_len + kTableKeys - 1) / kTableKeys * kTableKeys + size - 1) / size;
  const int entries = static_cast<int>(min(padded, params.page_table_stride));
  int32_t* row = params.page_table + request * params.page_table_stride;
  if (size == 1 && !params.slot_map) {
    write_slots(params, slots, pages, entries, row, first, step);
    return;
  }
#pragma unroll 4
  for (int page = first; page < entries; page += step) {
    row[page] = page < pages ? page_of(params, slots[min((page + 1) * size, kv_len) - 1]) : 0;
  }
}

// The whole table, by `blocks` blocks of which this is number `block`: as many threads a request as
// there are, a power of two and whole warps.
__device__ inline void write_page_table(const PageTableParams& params, int block, int blocks) {
  const int threads = blocks * static_cast<int>(blockDim.x);
  int shift = 5;
  while (static_cast<int64_t>(params.requests) << (shift + 1) <= threads) ++shift;
  const int thread = block * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x);
  const int groups = threads >> shift;
  if (thread >> shift >= groups) return;
  for (int request = thread >> shift; request < params.requests; request += groups) {
    write_page_row(params, request, thread & ((1 << shift) - 1), 1 << shift);
  }
}

// What the blocks of a plan's launch do: those that plan call plan(), the others write the table. A plan
// behind another one does not wait to begin, since that one has waited before it let this one start; it
// waits to end, so that whoever waits for it waits for both.
template <typename Params, typename Plan>
__device__ void run_plan(const Params& params, Plan plan) {
  if (!params.company.behind_plan) wait_for_previous_kernel();
  allow_next_kernel();
  const int block = static_cast<int>(blockIdx.x) - static_cast<int>(gridDim.x) + params.table_blocks;
  if (block >= 0) {
    write_page_table(params.company.pages, block, params.table_blocks);
  } else {
    plan();
  }
  if (params.company.behind_plan) wait_for_previous_kernel();
}

}  // namespace fovea::kernels::cuda
