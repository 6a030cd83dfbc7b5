// SPDX-License-Identifier: Apache-2.0
// One CTA row per request: blockIdx.y is the request, the threads take its pages. Reads one slot a page:
// the page invariant says the others follow it.
#pragma once

#include "kernels/cuda/common/attention_params.h"
#include "kernels/cuda/common/types.cuh"

namespace fovea::kernels::cuda {

template <int kThreads>
struct Config {
  using Params = PageTableParams;
  static constexpr int kBlocksPerSm = 1;
  static constexpr KernelTraits kTraits = {kThreads, 0, 0, 0};

  __device__ static void run(const Params& params) {
    const int64_t request = blockIdx.y;
    const int pages = (params.kv_lens[request] + params.page_size - 1) / params.page_size;
    const int64_t row = params.request_rows[request] * params.request_slots_stride;
    for (int64_t page = blockIdx.x * kThreads + threadIdx.x; page < params.page_table_stride;
         page += gridDim.x * kThreads) {
      int64_t entry = 0;
      if (page < pages) {
        int64_t slot = params.request_slots[row + page * params.page_size];
        if (params.slot_map) slot = max(params.slot_map[slot], 0ll);
        entry = slot / params.page_size;
      }
      params.page_table[request * params.page_table_stride + page] = static_cast<int32_t>(entry);
    }
  }
};

}  // namespace fovea::kernels::cuda
