// SPDX-License-Identifier: Apache-2.0
// From the tokens that neighbouring requests share to the groups of every level, as find_prefix_levels
// does on the host, in one CTA.
#pragma once

#include "kernels/cuda/common/overlap.cuh"
#include "kernels/cuda/common/prefix_params.h"
#include "kernels/cuda/common/scan.cuh"
#include "kernels/cuda/common/visibility.cuh"

namespace fovea::kernels::cuda {

constexpr int kHeldRequests = 1024;  // whose scratch is in shared memory
constexpr int kNoKeys = 0x7fffffff;

template <int kThreads>
struct PrefixPlanConfig {
  using Params = PrefixPlanParams;
  static constexpr int kBlocksPerSm = 1;
  static constexpr int kWarps = kThreads / 32;

  struct SharedMemory {
    int warp_begins[kWarps];
    unsigned long long saved;
    int scratch[kPrefixScratch][kHeldRequests];
  };
  static constexpr KernelTraits kTraits = {kThreads, sizeof(SharedMemory), 0, 0};

  // Of every request; those of a group are at its first request.
  struct Requests {
    int count;
    int* common;      // tokens shared with the request before, all of them cached; -1: none
    int* first_keys;  // keys before belong to groups of the levels before
    int* begin;       // first request of the group
    int* last;        // of the group
    int* keys;        // of the group
  };

  __device__ static Requests place_requests(const Params& params, SharedMemory& shared) {
    const int count = params.batch.requests;
    int* base = count <= kHeldRequests ? shared.scratch[0] : params.scratch;
    const int64_t stride = count <= kHeldRequests ? kHeldRequests : count;
    return {count, base, base + stride, base + 2 * stride, base + 3 * stride, base + 4 * stride};
  }

  __device__ static bool is_short(const Params& params, const RequestView& view) {
    return view.q_len > 0 && view.q_len <= params.most_q_len;
  }
  __device__ static int common(const Params& params, int request) {
    if (request == 0) return -1;
    const RequestView view = request_view(params.batch, request);
    const RequestView before = request_view(params.batch, request - 1);
    if (!is_short(params, view) || !is_short(params, before)) return -1;
    return min(params.shared_prefix[request], min(view.prefix(), before.prefix()));
  }

  // The largest value of this thread, those before it and `carry`, which becomes that of all threads.
  __device__ static int running_max(int value, int& carry, int* warp_max) {
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int before = __shfl_up_sync(~0u, value, step);
      if (lane >= step) value = max(value, before);
    }
    __syncthreads();  // the memory may still be read from the last time
    if (lane == 31) warp_max[warp] = value;
    __syncthreads();
    value = max(value, carry);
    for (int i = 0; i < kWarps; ++i) {
      if (i < warp) value = max(value, warp_max[i]);
      carry = max(carry, warp_max[i]);
    }
    return value;
  }

  // Groups of requests that each share least_prefix keys more with the one before.
  __device__ static void find_groups(const Params& params, const Requests& at, int* warp_begins) {
    int carry = 0;
    for (int base = 0; base < at.count; base += kThreads) {
      const int request = base + static_cast<int>(threadIdx.x);
      const bool live = request < at.count;
      const bool joins = live && at.common[request] >= at.first_keys[request] + params.least_prefix;
      const int begin = running_max(live && !joins ? request : 0, carry, warp_begins);
      if (!live) continue;
      at.begin[request] = begin;
      at.keys[request] = kNoKeys;
    }
    __syncthreads();
  }

  // Their last requests and the keys that all of a group share.
  __device__ static void measure_groups(const Requests& at) {
    const int lane = threadIdx.x % 32;
    for (int base = 0; base < at.count; base += kThreads) {
      const int request = base + static_cast<int>(threadIdx.x);
      const bool live = request < at.count;
      const int begin = live ? at.begin[request] : -1;
      const bool ends = live && (request + 1 == at.count || at.begin[request + 1] != begin);
      if (ends) at.last[begin] = request;
      // Of the group's requests in this warp first: thousands of atomics on one word take 1 us.
      int keys = live && request != begin ? at.common[request] : kNoKeys;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int before = __shfl_up_sync(~0u, keys, step);
        const int its_begin = __shfl_up_sync(~0u, begin, step);
        if (lane >= step && its_begin == begin) keys = min(keys, before);
      }
      if (ends || (live && lane == 31)) atomicMin(&at.keys[begin], keys);
    }
    __syncthreads();
  }

  // Keys that the groups save from being read again, added to `saved`.
  __device__ static void add_savings(const Requests& at, unsigned long long& saved) {
    int64_t own = 0;
    for (int i = threadIdx.x; i < at.count; i += kThreads) {
      if (at.begin[i] != i) own += at.keys[at.begin[i]] - at.first_keys[i];
    }
    own = warp_scan(own);
    if (threadIdx.x % 32 == 31) atomicAdd(&saved, static_cast<unsigned long long>(own));
    __syncthreads();
  }

  __device__ static void write_groups(const Params& params, const PrefixGroups& groups, const Requests& at,
                                      bool worth) {
    if (threadIdx.x == 0) groups.q_indptr[0] = 0;
    for (int i = threadIdx.x; i < at.count; i += kThreads) {
      const int begin = at.begin[i];
      const bool grouped = at.last[begin] > begin;
      groups.q_indptr[i + 1] = params.batch.q_indptr[at.last[begin] + 1];
      groups.first_keys[i] = at.first_keys[i];
      groups.kv_lens[i] = worth && grouped && begin == i ? at.keys[i] : 0;
      if (worth && grouped) at.first_keys[i] = at.keys[begin];
    }
    __syncthreads();
  }

  __device__ static void run(const Params& params) {
    extern __shared__ __align__(16) char dynamic_shared[];
    auto& shared = *reinterpret_cast<SharedMemory*>(dynamic_shared);
    const Requests at = place_requests(params, shared);
    wait_and_allow_next();
    for (int i = threadIdx.x; i < at.count; i += kThreads) {
      at.common[i] = common(params, i);
      at.first_keys[i] = 0;
    }
    bool worth = true;
    for (int level = 0; level < params.levels; ++level) {
      if (threadIdx.x == 0) shared.saved = 0;
      find_groups(params, at, shared.warp_begins);
      measure_groups(at);
      add_savings(at, shared.saved);
      worth = worth && shared.saved >= static_cast<unsigned long long>(params.least_saved);
      write_groups(params, params.groups[level], at, worth);
    }
    for (int i = threadIdx.x; i < at.count; i += kThreads) params.first_keys[i] = at.first_keys[i];
  }
};

template <int kThreads>
using Config = PrefixPlanConfig<kThreads>;

}  // namespace fovea::kernels::cuda
