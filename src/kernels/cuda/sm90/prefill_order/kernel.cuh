// SPDX-License-Identifier: Apache-2.0
// Puts the row tiles of a batch in order of their keys, most first, in one CTA and without the host: a
// counting sort. Blocks that take tiles in this order finish within one short tile of each other. The
// order among tiles of one bucket is left to chance; no result depends on it.
#pragma once

#include "kernels/cuda/common/plan_launch.cuh"
#include "kernels/cuda/common/prefill_params.h"
#include "kernels/cuda/common/scan.cuh"
#include "kernels/cuda/common/visibility.cuh"

namespace fovea::kernels::cuda {

constexpr int kBuckets = 1024;
// Blocks that read the same keys at about the same time cost L2 least. With few heads in a section the tiles of
// one that run together differ much in length and drift apart, with many its keys leave L2: 16, 32, 64 MB reach
// 682, 704, 714 TFLOP/s at 1x16k and 628, 644, 631 at 4x4k, 32 kv heads (H200, 2026-11-21).
constexpr int64_t kSectionBytes = 32 << 20;

template <int kThreads>
struct PrefillOrderConfig {
  static_assert(kThreads == kBuckets);
  using Params = PlanLaunch<PrefillOrderParams>;
  static constexpr int kBlocksPerSm = 1;

  struct SharedMemory {
    ScanMemory<int64_t> scan;
    // Of 1024 requests at a time.
    RequestView views[kThreads];
    int tile_begin[kThreads];
    int next[kBuckets];  // tiles in each bucket, then where the next one goes
    int longest;
  };
  static constexpr KernelTraits kTraits = {kThreads, sizeof(SharedMemory), 0, 0};

  // Tiles and keys, which are summed together: below 2^24 and 2^40.
  static constexpr int kKeyBits = 40;
  __device__ static int tiles_of(int64_t sum) { return static_cast<int>(sum >> kKeyBits); }
  __device__ static int64_t keys_of(int64_t sum) { return sum & ((int64_t{1} << kKeyBits) - 1); }

  // Views and first tiles of the requests from `first` on; returns the sum of their tiles and keys.
  __device__ static int64_t load_requests(const PrefillOrderParams& params, int first, SharedMemory& shared) {
    const int request = first + static_cast<int>(threadIdx.x);
    RequestView view = {request, 0, 0, 0};
    if (request < params.batch.requests) view = planned_view(params.batch, request);
    const int longest = __reduce_max_sync(~0u, max(view.kv_len, 0));
    if (threadIdx.x % 32 == 0) atomicMax(&shared.longest, longest);
    const int64_t tiles = (view.q_len + params.tokens_per_tile - 1) / params.tokens_per_tile;
    int64_t total;
    const int64_t before = exclusive_scan((tiles << kKeyBits) + max(view.kv_len, 0), total, shared.scan);
    shared.views[threadIdx.x] = view;
    shared.tile_begin[threadIdx.x] = tiles_of(before);
    __syncthreads();
    return total;
  }

  // Tile number `number` of the 1024 requests at hand and its bucket.
  struct Found {
    PrefillTile tile;
    int bucket;
  };
  __device__ static Found find_tile(const PrefillOrderParams& params, int requests, int number, int shift,
                                    const SharedMemory& shared) {
    int low = 0;  // the last request whose first tile is not after this one
    int high = requests;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (shared.tile_begin[middle] <= number ? low : high) = middle;
    }
    const RequestView view = shared.views[low];
    const int first = (number - shared.tile_begin[low]) * params.tokens_per_tile;
    const int last = min(first + params.tokens_per_tile, view.q_len) - 1;
    const Interval keys = visible_keys(params.batch.mask, view, first, last);
    return {{view.request, first}, min((keys.end - keys.begin) >> shift, kBuckets - 1)};
  }

  // Calls visit(Found) for every tile of the batch. Requests that are all at hand are not loaded again.
  template <typename Visit>
  __device__ static void for_each_tile(const PrefillOrderParams& params, int64_t sum, int shift,
                                       SharedMemory& shared, Visit visit) {
    const int requests = params.batch.requests;
    for (int first = 0; first < requests; first += kThreads) {
      if (requests > kThreads) {
        __syncthreads();
        sum = load_requests(params, first, shared);
      }
      for (int number = threadIdx.x; number < tiles_of(sum); number += kThreads) {
        visit(find_tile(params, min(requests - first, kThreads), number, shift, shared));
      }
    }
  }

  // What the tiles of a batch with so many keys have in common.
  __device__ static PrefillOrder order_of(const PrefillOrderParams& params, int tiles, int64_t keys) {
    const int64_t head_bytes = keys * params.token_bytes;
    const int64_t heads = head_bytes > 0 ? kSectionBytes / head_bytes : 1;
    // Rounded up to equal sections: a last one of few tiles would leave blocks without work.
    const int kv_heads = params.batch.kv_heads;
    const int sections = kv_heads / static_cast<int>(max(int64_t{1}, min(heads, int64_t{kv_heads})));
    const int section = (kv_heads + sections - 1) / sections;
    const int group = params.batch.q_heads / params.batch.kv_heads;
    return {params.tiles, tiles, section * (group >> params.heads_shift), 0, 0};
  }

  __device__ static void order(const PrefillOrderParams& params) {
    extern __shared__ __align__(16) char dynamic_shared[];
    auto& shared = *reinterpret_cast<SharedMemory*>(dynamic_shared);
    shared.next[threadIdx.x] = 0;
    if (threadIdx.x == 0) shared.longest = 0;
    __syncthreads();
    int64_t sum = 0;
    for (int first = 0; first < params.batch.requests; first += kThreads) {
      sum += load_requests(params, first, shared);
    }
    const int tiles = tiles_of(sum);
    const int shift = max(0, 32 - __clz(shared.longest) - 10);
    // A tile's place in its bucket; of a batch with more tiles than threads they are counted twice.
    Found own = {};
    int place = 0;
    for_each_tile(params, sum, shift, shared, [&](const Found& found) {
      own = found;
      place = atomicAdd(&shared.next[found.bucket], 1);
    });
    __syncthreads();
    // Tiles in the buckets before, from the fullest down.
    const int bucket = kBuckets - 1 - static_cast<int>(threadIdx.x);
    int64_t total;
    const auto begin = static_cast<int>(
        exclusive_scan(static_cast<int64_t>(shared.next[bucket]), total, shared.scan));
    shared.next[bucket] = begin;
    __syncthreads();
    if (params.batch.requests <= kThreads && tiles <= kThreads) {
      if (static_cast<int>(threadIdx.x) < tiles) params.tiles[shared.next[own.bucket] + place] = own.tile;
    } else {
      for_each_tile(params, sum, shift, shared, [&](const Found& found) {
        params.tiles[atomicAdd(&shared.next[found.bucket], 1)] = found.tile;
      });
    }
    if (threadIdx.x == kThreads - 1) *params.order = order_of(params, tiles, keys_of(sum));
  }

  __device__ static void run(const Params& params) {
    run_plan(params, [&] { order(params.plan); });
  }
};

template <int kThreads>
using Config = PrefillOrderConfig<kThreads>;

}  // namespace fovea::kernels::cuda
