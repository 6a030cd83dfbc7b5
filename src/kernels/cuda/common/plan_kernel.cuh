// SPDX-License-Identifier: Apache-2.0
// The common part of all plan kernels: wait, plan, and write the page table. The page table is
// found from the slot of each page's last token, because a window pool may have dropped the page's
// first tokens.
#pragma once

#include "kernels/cuda/common/plan_kernel_params.h"
#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/common/scan.cuh"
#include "kernels/cuda/common/types.cuh"

namespace fovea::kernels::cuda {

// Returns the page of the token at `place` of a page. Entries that name nothing in the pool become
// page 0.
__device__ inline int32_t page_of(const TableWriteParams& params, int32_t entry, int64_t place) {
  if (entry < 0 || entry >= params.given_end) return 0;
  int64_t slot = params.gives_pages ? int64_t{entry} * params.page_size + place : entry;
  if (params.slot_map) slot = max(params.slot_map[slot], 0ll);
  return static_cast<int32_t>(slot) / params.page_size;
}

// Copies entries that need no lookup: pages, or slots if pages have one token.
__device__ inline void copy_entries(const TableWriteParams& params, const int32_t* given, int pages,
                                    int entries, int32_t* row, int first, int step) {
#pragma unroll 8
  for (int page = first; page < entries; page += step) {
    const int entry = page < pages ? given[page] : 0;
    row[page] = entry >= 0 && entry < params.given_end ? entry : 0;
  }
}

// Writes the row of a request with threads `first`, `first + step`, ...
__device__ inline void write_page_row(const TableWriteParams& params, int64_t request, int first,
                                      int step) {
  const int64_t size = params.page_size;
  const int64_t kv_len =
      min(static_cast<int64_t>(params.kv_lens[request]), params.page_table_stride * size);
  const int32_t* given = params.given + params.request_rows[request] * params.given_stride;
  const int pages = static_cast<int>((kv_len + size - 1) / size);
  const int64_t padded = ((kv_len + kTableKeys - 1) / kTableKeys * kTableKeys + size - 1) / size;
  const int entries = static_cast<int>(min(padded, params.page_table_stride));
  int32_t* row = params.page_table + request * params.page_table_stride;
  if (params.gives_pages && !params.slot_map) {
    copy_entries(params, given, pages, entries, row, first, step);
    return;
  }
#pragma unroll 4
  for (int page = first; page < entries; page += step) {
    const int64_t last = min((page + 1) * size, kv_len) - 1;
    row[page] = page < pages
                    ? page_of(params, given[params.gives_pages ? page : last], last - page * size)
                    : 0;
  }
}

// Writes the table if pages have one token. There is much to copy then, and rows differ in length,
// so warps write pieces of kTableKeys entries instead of whole rows. Each warp counts the pieces of
// all requests, some requests a lane, to find its own.
__device__ inline void write_table_of_tokens(const TableWriteParams& params, int block,
                                             int blocks) {
  constexpr int kMaxOfLane = 8;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warps = static_cast<int>(blockDim.x) / 32;
  const int width = static_cast<int>(params.page_table_stride);
  const int of_lane = min((params.requests + 31) / 32, kMaxOfLane);
  int piece = block * warps + static_cast<int>(threadIdx.x) / 32;  // counted from request `turn` on
  for (int turn = 0; turn < params.requests; turn += 32 * of_lane) {
    const int first = turn + lane * of_lane;
    int kv_lens[kMaxOfLane], given_rows[kMaxOfLane];
#pragma unroll
    for (int i = 0; i < kMaxOfLane; ++i) {
      const bool is_one = i < of_lane && first + i < params.requests;
      kv_lens[i] = is_one ? min(params.kv_lens[first + i], width) : 0;
      given_rows[i] = is_one ? params.request_rows[first + i] : 0;
    }
    int own = 0;  // pieces of this lane's requests
#pragma unroll
    for (int i = 0; i < kMaxOfLane; ++i) own += (kv_lens[i] + kTableKeys - 1) / kTableKeys;
    const int end = warp_scan(own);
    const int all = __shfl_sync(~0u, end, 31);
    for (; piece < all; piece += blocks * warps) {
      const int owner = __ffs(__ballot_sync(~0u, end > piece)) - 1;
      int key = (piece - (end - own)) * kTableKeys;  // from the lane's first request on
      int request = -1, kv_len = 0, given_row = 0;
#pragma unroll
      for (int i = 0; i < kMaxOfLane; ++i) {
        if (request >= 0) break;
        if (key < kv_lens[i]) {
          request = first + i;
          kv_len = kv_lens[i];
          given_row = given_rows[i];
        } else {
          key -= (kv_lens[i] + kTableKeys - 1) / kTableKeys * kTableKeys;
        }
      }
      request = __shfl_sync(~0u, request, owner);
      kv_len = __shfl_sync(~0u, kv_len, owner);
      given_row = __shfl_sync(~0u, given_row, owner);
      key = __shfl_sync(~0u, key, owner);
      copy_entries(params, params.given + given_row * params.given_stride, kv_len,
                   min(key + kTableKeys, width),
                   params.page_table + request * params.page_table_stride, key + lane, 32);
    }
    piece -= all;
  }
}

// Writes the whole table with `blocks` blocks, of which this one is number `block`. With larger
// pages each request gets an equal number of threads: a power of two, and whole warps.
__device__ inline void write_page_table(const TableWriteParams& params, int block, int blocks) {
  if (params.page_size == 1 && !params.slot_map)
    return write_table_of_tokens(params, block, blocks);
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

// Runs a block of a plan's launch: the first blocks call plan(), the others write the table. A plan
// that follows another one does not wait before it starts, since that one waited before it let this
// one start. It waits before it ends, so that a kernel that waits for it waits for both.
template <typename Params, typename Plan>
__device__ void run_plan(const Params& params, Plan plan) {
  if (!params.tasks.follows_plan) wait_for_previous_kernel();
  allow_next_kernel();
  const int block =
      static_cast<int>(blockIdx.x) - static_cast<int>(gridDim.x) + params.table_blocks;
  if (block >= 0) {
    write_page_table(params.tasks.pages, block, params.table_blocks);
  } else {
    plan();
  }
  if (params.tasks.follows_plan) wait_for_previous_kernel();
}

}  // namespace fovea::kernels::cuda
