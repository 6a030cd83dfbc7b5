// SPDX-License-Identifier: Apache-2.0
// Sorts the row tiles of a batch by their keys, the longest first, in one block and without the
// host: a counting sort. Blocks that take tiles in this order finish within one short tile of each
// other. The order of tiles in one bucket varies; no result depends on it.
//   totals | how requests are cut | first tile of each request | a bucket of each tile | places |
//   the list
#pragma once

#include "kernels/cuda/common/division.cuh"
#include "kernels/cuda/common/plan_kernel.cuh"
#include "kernels/cuda/common/prefill_params.h"
#include "kernels/cuda/common/scan.cuh"
#include "kernels/cuda/common/visibility.cuh"

namespace fovea::kernels::cuda {

constexpr int kBuckets = 1024;
// Bytes of keys of a section. Blocks that read the same keys at about the same time load the L2
// least. With few heads in a section, its concurrent tiles differ much in length and drift apart;
// with many, its keys leave the L2 (chosen on H200, 2026-11-21).
constexpr float kSectionBytes = 32 << 20;
// For few long requests twice as much, so that tiles of this many (request, q head) pairs are
// interleaved (chosen on H200, 2026-11-22).
constexpr float kSectionSequences = 16;
// The same in fp8 and at head dim 64 (chosen on H200, 2026-11-22).
constexpr float kNarrowSectionSequences = 64;
constexpr int kNarrowTokenBytes = 256;
// Short requests whose q heads share keys form sections of their own: all heads of the next
// requests with so many bytes of keys, so that the short tiles of a section run alongside the long
// ones of the next (chosen on H200, 2026-11-22).
constexpr float kRequestSectionBytes = 16 << 20;
constexpr int kMinTokenBytes = 512;
constexpr int kMaxSections = 64;
// Tiles of a section for each block: with fewer, blocks wait for its longest one.
constexpr int kMinSectionTiles = 2;

// Tiles are cut into pieces so that each block has about this many (chosen on H200, 2026-11-22).
constexpr float kPieces = 8;

// cut: keys are summed in segments, and tiles of requests with few new tokens may be cut between
// these.
enum Tiles : int { whole, cut };

// How the tile of a request is cut: into `count` pieces of `piece` segments, from the segments that
// its rows see.
struct Cut {
  int first, end;
  int piece, count;
};
// `wanted` is the approximate number of segments of a piece.
__device__ inline Cut cut_of(const PrefillOrderParams& params, const RequestView& view,
                             int wanted) {
  const Interval seen = visible_keys(params.batch.mask, view, 0, view.q_len - 1);
  const int first = quotient(seen.begin, params.segment_keys);
  const int end = max(quotient(seen.end + params.segment_keys - 1, params.segment_keys), first + 1);
  const int pieces = max(quotient(end - first + wanted / 2, wanted), 1);
  const int piece = quotient(end - first + pieces - 1, pieces);
  return {first, end, piece, quotient(end - first + piece - 1, piece)};
}

template <int kThreads, Tiles kTiles>
struct PrefillOrderer {
  static_assert(kBuckets == 4 * kThreads);
  static constexpr bool kCut = kTiles == cut;
  static constexpr int kHeld = 1024;  // requests, and tiles, that are in shared memory at a time
  using Params = PlanKernelParams<PrefillOrderParams>;
  static constexpr int kBlocksPerSm = 1;

  struct Request {
    RequestView view;
    Cut cut;
    int partial;  // row of its first partial result; -1: the tile is not cut
  };
  // Neighbouring buckets.
  struct alignas(16) Four {
    int values[4];
  };
  // Approximate work of all blocks of a launch.
  struct Totals {
    float keys;
    int tiles, longest;
    int any_few;  // some request has so few rows that it may be cut
  };
  // Sections of `requests` requests, the first of which has the last 2^levels buckets of 2^shift
  // keys.
  struct Buckets {
    int sections, requests, levels, shift;
    __device__ __forceinline__ int of(int request, int keys) const {
      const int section = sections == 1 ? 0 : quotient(request, requests);
      return ((sections - 1 - section) << levels) + min(keys >> shift, (1 << levels) - 1);
    }
  };
  // A tile and its place in its bucket.
  struct Found {
    PrefillTile tile;
    TileSegments segments;
    int bucket, place;
  };
  struct SharedMemory {
    Four next[kThreads];  // tiles in each bucket, then where the next one goes
    alignas(16) Totals totals[kThreads / 32];
    WarpTotals<int64_t, kThreads> tile_scan, whole_scan;
    WarpTotals<int, kThreads> bucket_scan;
    Request requests[kHeld];
    int tile_begin[kHeld];
    Found tiles[kHeld];
    int sorted[kHeld];  // numbers of tiles
  };
  static constexpr KernelTraits kTraits = {kThreads, sizeof(SharedMemory), 0, 0};

  // Numbers of tiles and of (token, segment) pairs of partial results, which are summed together.
  __device__ static int tiles_of(int64_t sum) { return static_cast<int>(sum); }
  __device__ static int partials_of(int64_t sum) { return static_cast<int>(sum >> 32); }

  __device__ static bool has_few_rows(const PrefillOrderParams& params, const RequestView& view) {
    return view.q_len > 0 && view.q_len <= 64 >> params.heads_shift;
  }
  __device__ static int tile_count(const PrefillOrderParams& params, const Request& request) {
    if (kCut && request.partial >= 0) return request.cut.count;
    return quotient(request.view.q_len + params.tokens_per_tile - 1, params.tokens_per_tile);
  }

  // Loads the requests from `first` on into shared memory, not cut yet, and adds them to each
  // thread's totals.
  __device__ static void load_requests(const PrefillOrderParams& params, int first,
                                       SharedMemory& shared, Totals& own) {
    const int count = min(params.batch.requests - first, kHeld);
#pragma unroll 1
    for (int i = threadIdx.x; i < count; i += kThreads) {
      const RequestView view = planned_view(params.batch, first + i);
      Request& request = shared.requests[i];
      request.view = view;
      request.partial = -1;
      own.keys += static_cast<float>(max(view.kv_len, 0));
      own.longest = max(own.longest, view.kv_len);
      own.tiles += tile_count(params, request);
      if constexpr (kCut) own.any_few |= has_few_rows(params, view);
    }
  }

  // Returns the sum of all threads' totals. The requests are in shared memory afterwards.
  __device__ static Totals add_totals(const Totals& own, SharedMemory& shared) {
    float keys = own.keys;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) keys += __shfl_xor_sync(~0u, keys, step);
    const int tiles = __reduce_add_sync(~0u, own.tiles);
    const int longest = __reduce_max_sync(~0u, own.longest);
    const int any_few = kCut ? __any_sync(~0u, own.any_few) : 0;
    if (threadIdx.x % 32 == 0) shared.totals[threadIdx.x / 32] = {keys, tiles, longest, any_few};
    __syncthreads();
    Totals all = {};
#pragma unroll
    for (const Totals& warp : shared.totals) {
      all = {all.keys + warp.keys, all.tiles + warp.tiles, max(all.longest, warp.longest),
             all.any_few | warp.any_few};
    }
    return all;
  }

  // Returns the segments of a piece; 0: no tile is cut, because dealing whole tiles in turn costs
  // little.
  __device__ static int wanted_segments(const PrefillOrderParams& params, const Totals& all) {
    if (!all.any_few || params.max_partials == 0) return 0;
    const auto head_blocks = static_cast<float>(params.batch.q_heads >> params.heads_shift);
    const auto blocks = static_cast<float>(params.blocks);
    const float share = all.keys * head_blocks / blocks;
    const float turns = ceilf(static_cast<float>(all.tiles) * head_blocks / blocks);
    if (turns * static_cast<float>(all.longest) <= share * (17.0f / 16)) return 0;
    return max(static_cast<int>(share / (kPieces * static_cast<float>(params.segment_keys)) + 0.5f),
               1);
  }

  // Cuts the loaded requests, with room for their partial results from `placed` on, and finds where
  // their tiles begin among them. A tile without room is not cut and keeps its bits. Returns the
  // number of tiles.
  __device__ static int place_tiles(const PrefillOrderParams& params, int count, int wanted,
                                    int& placed, SharedMemory& shared) {
    const int each = (count + kThreads - 1) / kThreads;
    const int begin = min(static_cast<int>(threadIdx.x) * each, count);
    const int end = min(begin + each, count);
    const auto partials = [](const Request& request) {
      return request.partial < 0 ? 0 : request.view.q_len * (request.cut.end - request.cut.first);
    };
    int64_t own = 0;
#pragma unroll 1
    for (int i = begin; i < end; ++i) {
      Request& request = shared.requests[i];
      if (kCut && wanted > 0 && has_few_rows(params, request.view)) {
        request.cut = cut_of(params, request.view, wanted);
        request.partial = request.cut.count > 1 ? 0 : -1;
      }
      own += (static_cast<int64_t>(partials(request)) << 32) + tile_count(params, request);
    }
    int64_t total;
    int64_t before = exclusive_scan<kThreads>(own, total, shared.tile_scan);
    if constexpr (kCut) {
      int place = placed + partials_of(before);
      placed += partials_of(total);
      int64_t kept = 0;
#pragma unroll 1
      for (int i = begin; i < end; ++i) {
        Request& request = shared.requests[i];
        const int needed = partials(request);
        if (needed > 0) request.partial = place + needed > params.max_partials ? -1 : place;
        place += needed;
        kept += tile_count(params, request);
      }
      if (placed > params.max_partials)
        before = exclusive_scan<kThreads>(kept, total, shared.whole_scan);
    }
    int at = tiles_of(before);
#pragma unroll 1
    for (int i = begin; i < end; ++i) {
      shared.tile_begin[i] = at;
      at += tile_count(params, shared.requests[i]);
    }
    __syncthreads();
    return tiles_of(total);
  }

  // Finds tile `number` of the loaded requests and its bucket.
  __device__ static Found find_tile(const PrefillOrderParams& params, int requests, int number,
                                    const Buckets& buckets, const SharedMemory& shared) {
    int low = 0;  // the last request whose first tile is not after this one
    int high = requests;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (shared.tile_begin[middle] <= number ? low : high) = middle;
    }
    const Request& request = shared.requests[low];
    const RequestView& view = request.view;
    const int own = number - shared.tile_begin[low];
    TileSegments segments = {view.q_begin, view.q_len, view.kv_len, 0, 0, -1};
    if (kCut && request.partial >= 0) {
      const Cut& cut = request.cut;
      segments.begin = cut.first + own * cut.piece;
      segments.end = min(segments.begin + cut.piece, cut.end);
      segments.partial = request.partial;
      const int keys = (segments.end - segments.begin) * params.segment_keys;
      return {{view.request, 0}, segments, buckets.of(view.request, keys), 0};
    }
    const int first = own * params.tokens_per_tile;
    const int last = min(first + params.tokens_per_tile, view.q_len) - 1;
    const Interval keys = visible_keys(params.batch.mask, view, first, last);
    return {{view.request, first}, segments, buckets.of(view.request, keys.end - keys.begin), 0};
  }

  // Calls visit(number, Found) for every tile of the batch; returns their number. Requests that do
  // not fit at once are loaded again.
  template <typename Visit>
  __device__ static int for_each_tile(const PrefillOrderParams& params, int wanted,
                                      const Buckets& buckets, SharedMemory& shared, Visit visit) {
    const int requests = params.batch.requests;
    int tiles = 0;
    int placed = 0;
    for (int first = 0; first < requests; first += kHeld) {
      if (requests > kHeld) {
        Totals again = {};
        __syncthreads();
        load_requests(params, first, shared, again);
        __syncthreads();
      }
      const int count = min(requests - first, kHeld);
      const int found = place_tiles(params, count, wanted, placed, shared);
#pragma unroll 1
      for (int i = threadIdx.x; i < found; i += kThreads) {
        visit(tiles + i, find_tile(params, count, i, buckets, shared));
      }
      tiles += found;
    }
    return tiles;
  }

  // A concurrent kernel shares the L2.
  __device__ static bool runs_concurrently(const PrefillOrderParams& params) {
    return params.batch.max_planned_q_len > 0;
  }

  // There are several sections of requests, or one section of all.
  __device__ static Buckets buckets_of(const PrefillOrderParams& params, const Totals& all,
                                       int wanted) {
    constexpr int kLevels = 10;
    static_assert(kBuckets == 1 << kLevels);
    const BatchParams& batch = params.batch;
    int sections = 1;
    int each = batch.requests;
    if (wanted == 0 && params.heads_shift > 0 && params.token_bytes >= kMinTokenBytes &&
        !runs_concurrently(params)) {
      const float bytes =
          static_cast<float>(all.longest) * static_cast<float>(params.token_bytes * batch.kv_heads);
      const int fitting =
          static_cast<int>(fminf(kRequestSectionBytes / bytes, static_cast<float>(batch.requests)));
      const int found = quotient(batch.requests + fitting - 1, max(fitting, 1));
      const int64_t tiles = static_cast<int64_t>(all.tiles) * (batch.q_heads >> params.heads_shift);
      if (fitting > 0 && found <= kMaxSections &&
          tiles >= kMinSectionTiles * params.blocks * found) {
        sections = found;
        each = fitting;
      }
    }
    const int levels = kLevels - (sections > 1 ? 32 - __clz(sections - 1) : 0);
    return {sections, each, levels, max(0, 32 - __clz(all.longest) - levels)};
  }

  // The section that tiles of a batch with so many keys share. all_heads: heads of a section.
  __device__ static PrefillOrder order_of(const PrefillOrderParams& params, int tiles, float keys,
                                          bool all_heads) {
    const float head_bytes = keys * static_cast<float>(params.token_bytes);
    const float fitting = kSectionBytes / (runs_concurrently(params) ? 2 : 1) /
                          head_bytes;  // heads; infinite without keys
    const float sequences =
        params.token_bytes <= kNarrowTokenBytes ? kNarrowSectionSequences : kSectionSequences;
    const float few =
        sequences / static_cast<float>(max(params.batch.requests << params.heads_shift, 1));
    const int kv_heads = params.batch.kv_heads;
    const float most = fmaxf(fitting, fminf(2 * fitting, floorf(few)));
    const int heads =
        all_heads ? kv_heads : max(static_cast<int>(fminf(most, static_cast<float>(kv_heads))), 1);
    // Rounded up to equal sections: a last section of few tiles would leave blocks without work.
    const int sections = quotient(kv_heads, heads);
    const int section = quotient(kv_heads + sections - 1, sections);
    const int group = quotient(params.batch.q_heads, kv_heads);
    return {params.tiles, tiles, section * (group >> params.heads_shift), 0, 0};
  }

  __device__ static void order(const PrefillOrderParams& params, SharedMemory& shared) {
    const int thread = static_cast<int>(threadIdx.x);
    // Each thread has four buckets, from the fullest down.
    Four& own_buckets = shared.next[kThreads - 1 - thread];
    int* const next = shared.next[0].values;
    own_buckets = {};
    Totals own = {};
    for (int first = 0; first < params.batch.requests; first += kHeld)
      load_requests(params, first, shared, own);
    const Totals all = add_totals(own, shared);
    const int wanted = kCut ? wanted_segments(params, all) : 0;
    if (wanted > 0) {
      const int counters = params.batch.requests * (params.batch.q_heads >> params.heads_shift);
      for (int i = thread; i < counters; i += kThreads) params.segments.stored[i] = 0;
    }
    const Buckets buckets = buckets_of(params, all, wanted);
    const int tiles = for_each_tile(params, wanted, buckets, shared, [&](int number, Found found) {
      found.place = atomicAdd(&next[found.bucket], 1);
      if (number < kHeld) shared.tiles[number] = found;
    });
    if (thread == kThreads - 1)
      *params.order = order_of(params, tiles, all.keys, buckets.sections > 1);
    __syncthreads();
    const auto [a, b, c, d] = own_buckets.values;
    int total;
    const int begin = exclusive_scan<kThreads>(a + b + c + d, total, shared.bucket_scan);
    own_buckets = {{begin + d + c + b, begin + d + c, begin + d, begin}};
    __syncthreads();
    const auto store = [&](int place, const Found& found) {
      params.tiles[place] = found.tile;
      if constexpr (kCut) params.segments.tiles[place] = found.segments;
    };
    if (tiles > kHeld) {
      for_each_tile(params, wanted, buckets, shared, [&](int, const Found& found) {
        store(atomicAdd(&next[found.bucket], 1), found);
      });
      return;
    }
    // Neighbouring threads store neighbouring tiles: a word of 32 places takes 32 cycles.
#pragma unroll 1
    for (int i = thread; i < tiles; i += kThreads) {
      const Found& found = shared.tiles[i];
      shared.sorted[next[found.bucket] + found.place] = i;
    }
    __syncthreads();
#pragma unroll 1
    for (int i = thread; i < tiles; i += kThreads) store(i, shared.tiles[shared.sorted[i]]);
  }

  __device__ static void run(const Params& params) {
    extern __shared__ __align__(16) char dynamic_shared[];
    run_plan(params, [&] { order(params.plan, *reinterpret_cast<SharedMemory*>(dynamic_shared)); });
  }
};

}  // namespace fovea::kernels::cuda
