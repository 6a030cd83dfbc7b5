// SPDX-License-Identifier: Apache-2.0
// Copies the cached tokens of a request between pools with other pages. A warp copies one row of a
// head at a time.
#pragma once

#include "kernels/cuda/common/overlap.cuh"
#include "kernels/cuda/common/page_copy_params.h"

namespace fovea::kernels::cuda {

enum PageCopyOp { rows };

struct PageCopyConfig {
  using Params = PageCopyParams;
  static constexpr int kWarps = 8;
  static constexpr int kBlocksPerSm = 1;
  static constexpr KernelTraits kTraits = {kWarps * 32, 0, kWarps, 0};

  __device__ static void run(const Params& params) {
    wait_and_allow_next();
    const CopiedRows& array = params.arrays[blockIdx.y];
    const int count = params.tokens * params.heads;
    for (int i = blockIdx.x * kWarps + threadIdx.x / 32; i < count; i += gridDim.x * kWarps) {
      const int64_t token = params.first + i / params.heads;
      const int head = i % params.heads;
      const char* const from = array.from +
                               place(params.from_pages, params.from_page_size, params.first, token,
                                     array.from_page, array.from_token) +
                               head * array.from_head;
      char* const to = array.to +
                       place(params.to_pages, params.to_page_size, params.first, token,
                             array.to_page, array.to_token) +
                       head * array.to_head;
      if (array.unit == 16) {
        copy<uint4>(from, to, array.row_bytes);
      } else {
        copy<uint32_t>(from, to, array.row_bytes);
      }
    }
  }

 private:
  // Bytes from the first page of an array to a token.
  __device__ static int64_t place(const int32_t* pages, int page_size, int64_t first, int64_t token,
                                  int64_t page_stride, int64_t token_stride) {
    const int page = pages[token / page_size - first / page_size];
    return page * page_stride + token % page_size * token_stride;
  }

  template <class Unit>
  __device__ static void copy(const char* from, char* to, int bytes) {
    const int units = bytes / static_cast<int>(sizeof(Unit));
    for (int i = threadIdx.x % 32; i < units; i += 32) {
      reinterpret_cast<Unit*>(to)[i] = reinterpret_cast<const Unit*>(from)[i];
    }
  }
};

template <auto kOp>
using Config = PageCopyConfig;

}  // namespace fovea::kernels::cuda
