// SPDX-License-Identifier: Apache-2.0
// One CTA row per request: blockIdx.y is the request, the threads take its pages. Reads one slot a
// page, of its last token: where a window pool has forgotten the first tokens of a page, it still has
// the last.
#pragma once

#include "kernels/cuda/common/attention_params.h"
#include "kernels/cuda/common/overlap.cuh"

namespace fovea::kernels::cuda {

template <int kThreads>
struct Config {
  using Params = PageTableParams;
  static constexpr int kBlocksPerSm = 1;
  static constexpr KernelTraits kTraits = {kThreads, 0, 0, 0};

  // Nothing wild is followed: what names no slot of the pool becomes page 0.
  __device__ static int32_t page_of(const Params& params, int64_t slot) {
    if (slot < 0 || slot >= params.slots) return 0;
    if (params.slot_map) slot = max(params.slot_map[slot], 0ll);
    return static_cast<int32_t>(slot) / params.page_size;
  }

  // Launched with overlap on sm_90 and later; the plan behind it reads nothing of it.
  __device__ static void run(const Params& params) {
    wait_and_allow_next();
    const int64_t request = blockIdx.y;
    const int64_t size = params.page_size;
    const int64_t kv_len = min(static_cast<int64_t>(params.kv_lens[request]),
                               params.page_table_stride * size);
    const int64_t pages = (kv_len + size - 1) / size;
    const int64_t padded = ((kv_len + kTableKeys - 1) / kTableKeys * kTableKeys + size - 1) / size;
    const int64_t entries = min(padded, params.page_table_stride);
    const int64_t row = params.request_rows[request] * params.request_slots_stride;
    for (int64_t page = blockIdx.x * kThreads + threadIdx.x; page < entries;
         page += gridDim.x * kThreads) {
      int32_t entry = 0;
      if (page < pages) {
        const int64_t last = min((page + 1) * size, kv_len) - 1;
        entry = page_of(params, params.request_slots[row + last]);
      }
      params.page_table[request * params.page_table_stride + page] = entry;
    }
  }
};

}  // namespace fovea::kernels::cuda
