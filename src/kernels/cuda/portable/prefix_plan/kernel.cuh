// SPDX-License-Identifier: Apache-2.0
// From the tokens that neighbouring requests share to the groups of every level, as find_prefix_levels
// does on the host, in one CTA.
#pragma once

#include "kernels/cuda/common/overlap.cuh"
#include "kernels/cuda/common/prefix_params.h"
#include "kernels/cuda/common/scan.cuh"
#include "kernels/cuda/common/visibility.cuh"

namespace fovea::kernels::cuda {

template <int kThreads>
struct PrefixPlanConfig {
  using Params = PrefixPlanParams;
  static constexpr int kBlocksPerSm = 1;
  static constexpr KernelTraits kTraits = {kThreads, 0, 0, 0};

  __device__ static bool is_short(const Params& params, const RequestView& view) {
    return view.q_len > 0 && view.q_len <= params.most_q_len;
  }

  // Tokens the request shares with the one before, all of them cached; -1: it shares none.
  __device__ static int common(const Params& params, int request) {
    if (request == 0) return -1;
    const RequestView view = request_view(params.batch, request);
    const RequestView before = request_view(params.batch, request - 1);
    if (!is_short(params, view) || !is_short(params, before)) return -1;
    return min(params.shared_prefix[request], min(view.prefix(), before.prefix()));
  }

  __device__ static bool joins(const Params& params, int request) {
    return common(params, request) >= params.first_keys[request] + params.least_prefix;
  }

  __device__ static int largest_of_warp(int value) {
    for (int step = 1; step < 32; step *= 2) value = max(value, __shfl_xor_sync(~0u, value, step));
    return value;
  }

  // The largest value of this thread and those before it; none is negative.
  __device__ static int running_max(int value, int* warp_max) {
    const int lane = threadIdx.x % 32;
    for (int step = 1; step < 32; step *= 2) {
      const int before = __shfl_up_sync(~0u, value, step);
      if (lane >= step) value = max(value, before);
    }
    __syncthreads();  // the memory may still be read from the last time
    if (lane == 31) warp_max[threadIdx.x / 32] = value;
    __syncthreads();
    const int earlier = lane < static_cast<int>(threadIdx.x) / 32 ? warp_max[lane] : 0;
    return max(value, largest_of_warp(earlier));
  }

  __device__ static void find_begins(const Params& params, const PrefixGroups& groups, int* warp_max) {
    const int requests = params.batch.requests;
    int carry = 0;
    for (int base = 0; base < requests; base += kThreads) {
      const int request = base + static_cast<int>(threadIdx.x);
      const bool live = request < requests;
      const int begin = max(running_max(live && !joins(params, request) ? request : 0, warp_max), carry);
      if (live) {
        params.group_begin[request] = begin;
        params.group_last[request] = 0;
        groups.kv_lens[request] = 0x7fffffff;
        groups.first_keys[request] = params.first_keys[request];
      }
      __syncthreads();
      carry = params.group_begin[min(base + kThreads, requests) - 1];
    }
    __syncthreads();
  }

  __device__ static void run(const Params& params) {
    __shared__ int warp_max[kThreads / 32];
    __shared__ unsigned long long saved;
    const int requests = params.batch.requests;
    const int first = threadIdx.x;
    wait_and_allow_next();
    for (int i = first; i < requests; i += kThreads) params.first_keys[i] = 0;
    bool worth = true;
    for (int level = 0; level < params.levels; ++level) {
      const PrefixGroups groups = params.groups[level];
      if (first == 0) saved = 0;
      __syncthreads();
      find_begins(params, groups, warp_max);
      for (int i = first; i < requests; i += kThreads) {
        const int begin = params.group_begin[i];
        if (begin == i) continue;
        atomicMin(&groups.kv_lens[begin], common(params, i));
        atomicMax(&params.group_last[begin], i);
      }
      __syncthreads();
      int64_t own = 0;
      for (int i = first; i < requests; i += kThreads) {
        const int begin = params.group_begin[i];
        if (begin != i) own += groups.kv_lens[begin] - params.first_keys[i];
      }
      own = warp_scan(own);
      if (first % 32 == 31) atomicAdd(&saved, static_cast<unsigned long long>(own));
      __syncthreads();
      worth = worth && saved >= static_cast<unsigned long long>(params.least_saved);
      if (first == 0) groups.q_indptr[0] = 0;
      for (int i = first; i < requests; i += kThreads) {
        const int begin = params.group_begin[i];
        const int last = params.group_last[begin];
        groups.q_indptr[i + 1] = params.batch.q_indptr[(last > 0 ? last : i) + 1];
        if (last > 0 && worth) params.first_keys[i] = groups.kv_lens[begin];
      }
      __syncthreads();
      for (int i = first; i < requests; i += kThreads) {
        const bool group = params.group_begin[i] == i && params.group_last[i] > 0;
        if (!group || !worth) groups.kv_lens[i] = 0;
      }
      __syncthreads();
    }
  }
};

template <int kThreads>
using Config = PrefixPlanConfig<kThreads>;

}  // namespace fovea::kernels::cuda
