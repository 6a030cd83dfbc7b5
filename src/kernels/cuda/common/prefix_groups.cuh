// SPDX-License-Identifier: Apache-2.0
// From the tokens that neighbouring requests share to the groups of every level, as
// find_prefix_levels does on the host.
#pragma once

#include "kernels/cuda/common/division.cuh"
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
    WarpTotals<int64_t, kThreads> saved;
    int scratch[kPrefixScratch][kHeldRequests];
  };

  // Of every request.
  struct Requests {
    int count;
    int* common;       // tokens shared with the request before, all of them cached; -1: none
    int* first_keys;   // keys before belong to groups of the levels before
    uint32_t* starts;  // bits of the requests that begin a group
    int* begin;        // first request of the group
    int* last;         // of the group
    int* keys;         // of the group that begins with the request
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

  // Cached tokens of a request that may be in a group, else -1.
  __device__ static int cached(const Params& params, int q_begin, int q_end, int kv_len) {
    const int q_len = q_end - q_begin;
    return q_len > 0 && q_len <= params.most_q_len ? kv_len - q_len : -1;
  }
  // All is loaded at once: a trip to the L2 takes as long as a level.
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

  // Which requests begin a group: those that share less than least_prefix keys more with the one
  // before.
  __device__ static void mark_starts(const Params& params, const Requests& at) {
#pragma unroll 1
    for (int base = 0; base < at.count; base += kThreads) {
      const int request = base + static_cast<int>(threadIdx.x);
      const bool live = request < at.count;
      const bool joins = live && at.common[request] >= at.first_keys[request] + params.least_prefix;
      const uint32_t starts = __ballot_sync(~0u, live && !joins);
      if (live) at.keys[request] = kNoKeys;
      if (threadIdx.x % 32 == 0 && live) at.starts[request / 32] = starts;
    }
    __syncthreads();
  }

  // The last start up to each lane's request, by all lanes; of requests from 32 * word on, whose
  // starts are `own`.
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

  // The first start behind each lane's request, or the end of all.
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

  // The groups, and the keys that all of each share.
  __device__ static void measure_groups(const Requests& at) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll 1
    for (int base = 0; base < at.count; base += kThreads) {
      const int request = base + static_cast<int>(threadIdx.x);
      const int word = request / 32;
      if (word * 32 >= at.count) break;  // of the whole warp
      const bool live = request < at.count;
      const uint32_t starts = at.starts[word];
      const int begin = last_start(at, word, starts);
      const int last = next_start(at, word, starts) - 1;
      if (live) {
        at.begin[request] = begin;
        at.last[request] = last;
      }
      // Of the group's requests in this warp first: thousands of atomics on one word take 1 us.
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

  // Whether the groups save enough keys from being read again; each but one `more_saved` beside
  // those of all.
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
    return total >= params.least_saved - params.more_saved;
  }

  // Groups that do not save enough have no keys and leave those to the levels behind. Returns the
  // (token, key) pairs of the thread's groups in row tiles, of which each is computed whole.
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
    const int* first_keys;  // of each request that are in no group of these levels
    float pairs;            // (token, key) pairs of the groups, this thread's part
  };

  // What this block reads afterwards is there then.
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
