// SPDX-License-Identifier: Apache-2.0
// From the tokens that neighbouring requests share to the groups of every level, as find_prefix_levels
// does on the host.
#pragma once

#include "kernels/cuda/common/prefix_params.h"
#include "kernels/cuda/common/scan.cuh"
#include "kernels/cuda/common/types.cuh"

namespace fovea::kernels::cuda {

constexpr int kNoKeys = 0x7fffffff;

// All threads of a block.
template <int kThreads>
struct PrefixGroupsFinder {
  using Params = PrefixGroupsParams;
  static constexpr int kWarps = kThreads / 32;

  struct SharedMemory {
    int warp_begins[kWarps];
    WarpTotals<int64_t, kThreads> saved;
    int scratch[kPrefixScratch][kHeldRequests];
  };

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
    const int count = params.requests;
    const int64_t stride = count <= kHeldRequests ? kHeldRequests : count;
    int* base =
        count <= kHeldRequests ? shared.scratch[0] : params.scratch + blockIdx.x * stride * kPrefixScratch;
    return {count, base, base + stride, base + 2 * stride, base + 3 * stride, base + 4 * stride};
  }

  // Cached tokens of a request that may be in a group, else -1.
  __device__ static int cached(const Params& params, int request) {
    const int q_len = params.q_indptr[request + 1] - params.q_indptr[request];
    return q_len > 0 && q_len <= params.most_q_len ? params.kv_lens[request] - q_len : -1;
  }
  __device__ static int common(const Params& params, int request) {
    if (request == 0) return -1;
    const int own = cached(params, request);
    const int before = cached(params, request - 1);
    const int shared = params.shared_prefix[request];
    return own < 0 || before < 0 ? -1 : min(shared, min(own, before));
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
    const int other = lane < kWarps ? warp_max[lane] : 0;
    value = max(max(value, carry), __reduce_max_sync(~0u, lane < warp ? other : 0));
    carry = max(carry, __reduce_max_sync(~0u, other));
    return value;
  }

  // Groups of requests that each share least_prefix keys more with the one before.
  __device__ static void find_groups(const Params& params, const Requests& at, int* warp_begins) {
    int carry = 0;
#pragma unroll 1
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
#pragma unroll 1
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

  // Keys that the groups save from being read again.
  __device__ static int64_t find_savings(const Requests& at, WarpTotals<int64_t, kThreads>& memory) {
    int64_t own = 0;
#pragma unroll 1
    for (int i = threadIdx.x; i < at.count; i += kThreads) {
      if (at.begin[i] != i) own += at.keys[at.begin[i]] - at.first_keys[i];
    }
    int64_t total;
    exclusive_scan<kThreads>(own, total, memory);
    return total;
  }

  // Groups that do not save enough have no keys and leave those to the levels behind.
  __device__ static void end_level(const Params& params, const PrefixGroups& groups, const Requests& at, bool worth,
                                   bool written) {
    if (written && threadIdx.x == 0) groups.q_indptr[0] = 0;
#pragma unroll 1
    for (int i = threadIdx.x; i < at.count; i += kThreads) {
      const int begin = at.begin[i];
      const bool grouped = at.last[begin] > begin;
      if (written) {
        groups.q_indptr[i + 1] = params.q_indptr[at.last[begin] + 1];
        groups.first_keys[i] = at.first_keys[i];
        groups.kv_lens[i] = worth && grouped && begin == i ? at.keys[i] : 0;
      }
      if (worth && grouped) at.first_keys[i] = at.keys[begin];
    }
    __syncthreads();
  }

  // What this block reads afterwards is there then.
  __device__ static void run(const Params& params, int levels, int first_written, SharedMemory& shared) {
    const Requests at = place_requests(params, shared);
#pragma unroll 1
    for (int i = threadIdx.x; i < at.count; i += kThreads) {
      at.common[i] = common(params, i);
      at.first_keys[i] = 0;
    }
    bool worth = true;
#pragma unroll 1
    for (int level = 0; level < levels; ++level) {
      if (worth) {
        find_groups(params, at, shared.warp_begins);
        measure_groups(at);
        worth = find_savings(at, shared.saved) >= params.least_saved;
      }
      const PrefixGroups& groups = params.groups[level];
      end_level(params, groups, at, worth, groups.q_indptr && level >= first_written);
    }
    if (params.first_keys && levels == params.levels) {
#pragma unroll 1
      for (int i = threadIdx.x; i < at.count; i += kThreads) params.first_keys[i] = at.first_keys[i];
    }
    __syncthreads();
  }
};

}  // namespace fovea::kernels::cuda
