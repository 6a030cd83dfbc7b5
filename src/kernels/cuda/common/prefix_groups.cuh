// SPDX-License-Identifier: Apache-2.0
// Finds the groups of every level from the tokens that neighbouring requests share, as
// find_prefix_levels() does on the host.
#pragma once

#include "kernels/cuda/common/division.cuh"
#include "kernels/cuda/common/prefix_params.h"
#include "kernels/cuda/common/scan.cuh"
#include "kernels/cuda/common/types.cuh"

namespace fovea::kernels::cuda {

constexpr int kNoKeys = 0x7fffffff;

// Runs on all threads of a block.
template <int kThreads>
struct PrefixGroupsFinder {
  using Params = PrefixGroupsParams;
  static constexpr int kWarps = kThreads / 32;

  struct SharedMemory {
    WarpTotals<int64_t, kThreads> saved;
    int scratch[kPrefixScratch][kHeldRequests];
  };

  // Arrays with an entry for every request.
  struct Requests {
    int count;
    int* common;       // cached tokens shared with the preceding request; -1: none
    int* first_keys;   // keys before this one belong to groups of earlier levels
    uint32_t* starts;  // a bit for each request that begins a group
    int* begin;        // first request of the group
    int* last;         // last request of the group
    int* keys;         // keys of the group that begins with the request
  };

  __device__ static Requests place_requests(const Params& params, SharedMemory& shared) {
    const int count = params.requests;
    const int64_t stride = count <= kHeldRequests ? kHeldRequests : count;
    int* base = count <= kHeldRequests ? shared.scratch[0]
                                       : params.scratch + blockIdx.x * stride * kPrefixScratch;
    return {count,
            base,
            base + stride,
            reinterpret_cast<uint32_t*>(base + 2 * stride),
            base + 3 * stride,
            base + 4 * stride,
            base + 5 * stride};
  }

  // Returns the cached tokens of a request, or -1 if it may not be in a group.
  __device__ static int cached(const Params& params, int q_begin, int q_end, int kv_len) {
    const int q_len = q_end - q_begin;
    return q_len > 0 && q_len <= params.max_q_len ? kv_len - q_len : -1;
  }
  // Returns Requests::common of a request. It loads everything at once, because a trip to the L2
  // takes as long as a level.
  __device__ static int common(const Params& params, int request) {
    const int before = max(request - 1, 0);
    const int begin = params.q_indptr[before];
    const int middle = params.q_indptr[request];
    const int end = params.q_indptr[request + 1];
    const int kv_before = params.kv_lens[before];
    const int kv_len = params.kv_lens[request];
    const int shared = params.shared_prefix[request];
    const int own = cached(params, middle, end, kv_len);
    const int other = cached(params, begin, middle, kv_before);
    return request == 0 || own < 0 || other < 0 ? -1 : min(shared, min(own, other));
  }

  // Marks the requests that begin a group: they share fewer than min_prefix further keys with the
  // preceding request.
  __device__ static void mark_starts(const Params& params, const Requests& at) {
#pragma unroll 1
    for (int base = 0; base < at.count; base += kThreads) {
      const int request = base + static_cast<int>(threadIdx.x);
      const bool live = request < at.count;
      const bool joins = live && at.common[request] >= at.first_keys[request] + params.min_prefix;
      const uint32_t starts = __ballot_sync(~0u, live && !joins);
      if (live) at.keys[request] = kNoKeys;
      if (threadIdx.x % 32 == 0 && live) at.starts[request / 32] = starts;
    }
    __syncthreads();
  }

  // Returns the last start up to each lane's request. All lanes call it; their requests begin at
  // 32 * word, and `own` has the starts among them.
  __device__ static int last_start(const Requests& at, int word, uint32_t own) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const uint32_t here = own & ((2u << lane) - 1);
    int before = 0;
    // The first request of all is a start.
    for (int base = word / 32 * 32; word > 0 && !(own & 1); base -= 32) {
      const uint32_t starts = base + lane < word ? at.starts[base + lane] : 0;
      const uint32_t any = __ballot_sync(~0u, starts != 0);
      if (any == 0) continue;
      const int found = 31 - __clz(any);
      before = (base + found) * 32 + 31 - __clz(__shfl_sync(~0u, starts, found));
      break;
    }
    return here != 0 ? word * 32 + 31 - __clz(here) : before;
  }

  // Returns the first start after each lane's request, or the number of requests.
  __device__ static int next_start(const Requests& at, int word, uint32_t own) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const uint32_t here = own & ~((2u << lane) - 1);
    const int words = (at.count + 31) / 32;
    int behind = at.count;
    for (int base = (word + 1) / 32 * 32; base < words; base += 32) {
      const int i = base + lane;
      const uint32_t starts = i > word && i < words ? at.starts[i] : 0;
      const uint32_t any = __ballot_sync(~0u, starts != 0);
      if (any == 0) continue;
      const int found = __ffs(any) - 1;
      behind = (base + found) * 32 + __ffs(__shfl_sync(~0u, starts, found)) - 1;
      break;
    }
    return min(here != 0 ? word * 32 + __ffs(here) - 1 : behind, at.count);
  }

  // Finds the groups, and the keys that all requests of a group share.
  __device__ static void measure_groups(const Requests& at) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll 1
    for (int base = 0; base < at.count; base += kThreads) {
      const int request = base + static_cast<int>(threadIdx.x);
      const int word = request / 32;
      if (word * 32 >= at.count) break;  // the whole warp leaves
      const bool live = request < at.count;
      const uint32_t starts = at.starts[word];
      const int begin = last_start(at, word, starts);
      const int last = next_start(at, word, starts) - 1;
      if (live) {
        at.begin[request] = begin;
        at.last[request] = last;
      }
      // A warp reduces the requests of a group first: thousands of atomics on one word are slow.
      int keys = live && request != begin ? at.common[request] : kNoKeys;
      if ((starts & ~1u) == 0) {
        keys = __reduce_min_sync(~0u, keys);
      } else {
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
          const int before = __shfl_up_sync(~0u, keys, step);
          const int its_begin = __shfl_up_sync(~0u, begin, step);
          if (lane >= step && its_begin == begin) keys = min(keys, before);
        }
      }
      if (live && begin < last && (request == last || lane == 31)) atomicMin(&at.keys[begin], keys);
    }
    __syncthreads();
  }

  // Returns true if the groups save enough keys from being read again: min_saved for the level, and
  // more_saved for each group but one.
  __device__ static bool worth_it(const Params& params, const Requests& at,
                                  WarpTotals<int64_t, kThreads>& memory) {
    int64_t own = 0;
#pragma unroll 1
    for (int i = threadIdx.x; i < at.count; i += kThreads) {
      if (at.begin[i] != i) {
        own += at.keys[at.begin[i]] - at.first_keys[i];
      } else if (at.last[i] > i) {
        own -= params.more_saved;
      }
    }
    int64_t total;
    exclusive_scan<kThreads>(own, total, memory);
    return total >= params.min_saved - params.more_saved;
  }

  // Ends a level. If its groups do not save enough, they get no keys and leave them to later
  // levels. Returns the (token, key) pairs of the thread's groups, with every row tile counted
  // whole.
  __device__ static float end_level(const Params& params, const PrefixGroups& groups,
                                    const Requests& at, bool worth, bool written) {
    float pairs = 0;
    if (written && threadIdx.x == 0) groups.q_indptr[0] = 0;
#pragma unroll 1
    for (int i = threadIdx.x; i < at.count; i += kThreads) {
      const int begin = at.begin[i];
      const int last = at.last[i];
      const bool grouped = worth && last > begin;
      const int keys = grouped ? at.keys[begin] : 0;
      if (written) {
        groups.q_indptr[i + 1] = params.q_indptr[last + 1];
        groups.first_keys[i] = at.first_keys[i];
        groups.kv_lens[i] = begin == i ? keys : 0;
        groups.begins[i] = begin;
      }
      if (grouped && begin == i) {
        const int tokens = params.q_indptr[last + 1] - params.q_indptr[i];
        const int tiles = quotient(tokens + params.tile_tokens - 1, params.tile_tokens);
        pairs += static_cast<float>(tiles * params.tile_tokens) *
                 static_cast<float>(keys - at.first_keys[i]);
      }
      if (grouped) at.first_keys[i] = keys;
    }
    __syncthreads();
    return pairs;
  }

  struct Found {
    const int* first_keys;  // [requests] the first key that is in no group of these levels
    float pairs;            // this thread's share of the groups' (token, key) pairs
  };

  // Finds the groups and writes those of levels from first_written on. All threads may read the
  // results afterwards.
  __device__ static Found run(const Params& params, int levels, int first_written,
                              SharedMemory& shared) {
    const Requests at = place_requests(params, shared);
#pragma unroll 1
    for (int i = threadIdx.x; i < at.count; i += kThreads) {
      at.common[i] = common(params, i);
      at.first_keys[i] = 0;
    }
    float pairs = 0;
    bool worth = true;
#pragma unroll 1
    for (int level = 0; level < levels; ++level) {
      if (worth) {
        mark_starts(params, at);
        measure_groups(at);
        worth = worth_it(params, at, shared.saved);
      }
      const PrefixGroups& groups = params.groups[level];
      pairs += end_level(params, groups, at, worth, groups.q_indptr && level >= first_written);
    }
    if (params.first_keys && levels == params.levels) {
#pragma unroll 1
      for (int i = threadIdx.x; i < at.count; i += kThreads)
        params.first_keys[i] = at.first_keys[i];
    }
    __syncthreads();
    return {at.first_keys, pairs};
  }
};

}  // namespace fovea::kernels::cuda
