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
// Twice as much for few long requests, so that tiles of this many (request, q head) are interleaved: 734 instead of
// 725 TFLOP/s at 1x16k, 706 instead of 703 at 2x8k, 669 instead of 660 at 4x4k and head dim 256, 32 kv heads (H200,
// 2026-11-22).
constexpr int kSectionSequences = 16;

// Tiles are cut to pieces of which each block has about so many: 64 log-uniform lengths take 350, 311, 289 us with
// 2, 4, 8 (H200, 2026-11-22).
constexpr int kPieces = 8;

// cut: where keys are summed in segments, tiles of requests with few new tokens may be cut between them.
enum Tiles : int { whole, cut };

// How the tile of a request is cut: into equal pieces of about piece_keys.
struct Cut {
  int first, end;  // segments that its rows see
  int piece;       // segments
  __device__ int pieces() const { return (end - first + piece - 1) / piece; }
};
__device__ inline Cut cut_of(const PrefillOrderParams& params, const RequestView& view, int piece_keys) {
  const Interval seen = visible_keys(params.batch.mask, view, 0, view.q_len - 1);
  const int first = seen.begin / params.segment_keys;
  const int end = max((seen.end + params.segment_keys - 1) / params.segment_keys, first + 1);
  const int wanted = max((piece_keys + params.segment_keys / 2) / params.segment_keys, 1);
  const int pieces = max((end - first + wanted / 2) / wanted, 1);
  return {first, end, (end - first + pieces - 1) / pieces};
}

template <int kThreads, Tiles kTiles>
struct PrefillOrderConfig {
  static_assert(kThreads == kBuckets);
  static constexpr bool kCut = kTiles == cut;
  using Params = PlanLaunch<PrefillOrderParams>;
  static constexpr int kBlocksPerSm = 1;

  struct SharedMemory {
    ScanMemory<int64_t> scan;
    // Of 1024 requests at a time.
    RequestView views[kThreads];
    int tile_begin[kThreads];
    int next[kBuckets];  // tiles in each bucket, then where the next one goes
    int longest;
    int placed;  // (token, segment) pairs
    int piece_keys;
    int any_few;                            // whether a request has so few rows that it may be cut
    int partials[kTiles == cut ? kThreads : 1];  // of requests that are all at hand
  };
  static constexpr KernelTraits kTraits = {kThreads, sizeof(SharedMemory), 0, 0};

  // Tiles and keys, which are summed together: below 2^24 and 2^40.
  static constexpr int kKeyBits = 40;
  __device__ static int tiles_of(int64_t sum) { return static_cast<int>(sum >> kKeyBits); }
  __device__ static int64_t keys_of(int64_t sum) { return sum & ((int64_t{1} << kKeyBits) - 1); }

  __device__ static bool at_hand(const PrefillOrderParams& params) { return params.batch.requests <= kThreads; }
  __device__ static bool has_few_rows(const PrefillOrderParams& params, const RequestView& view) {
    return view.q_len > 0 && view.q_len <= 64 >> params.heads_shift;
  }

  // Views and first tiles of the requests from `first` on; returns the sum of their tiles and keys.
  __device__ static int64_t load_requests(const PrefillOrderParams& params, int first, SharedMemory& shared) {
    const int request = first + static_cast<int>(threadIdx.x);
    RequestView view = {request, 0, 0, 0};
    if (shared.piece_keys > 0 && at_hand(params)) {
      view = shared.views[threadIdx.x];  // the second time
    } else if (request < params.batch.requests) {
      view = planned_view(params.batch, request);
    }
    const int longest = __reduce_max_sync(~0u, max(view.kv_len, 0));
    if (threadIdx.x % 32 == 0) atomicMax(&shared.longest, longest);
    if (kCut && has_few_rows(params, view)) shared.any_few = 1;
    int64_t tiles = (view.q_len + params.tokens_per_tile - 1) / params.tokens_per_tile;
    if (is_cut(params, view, shared)) tiles = cut_of(params, view, shared.piece_keys).pieces();
    int64_t total;
    const int64_t before = exclusive_scan((tiles << kKeyBits) + max(view.kv_len, 0), total, shared.scan);
    shared.views[threadIdx.x] = view;
    shared.tile_begin[threadIdx.x] = tiles_of(before);
    __syncthreads();
    return total;
  }

  __device__ static int64_t load_all(const PrefillOrderParams& params, SharedMemory& shared) {
    int64_t sum = 0;
    for (int first = 0; first < params.batch.requests; first += kThreads) {
      sum += load_requests(params, first, shared);
    }
    return sum;
  }

  // The keys of a piece, for batches with so many tiles and keys; 0: none is cut, as dealing whole tiles in turn
  // costs little. 128 instead of 137 us for 32 requests of 4k (H200, 2026-11-22).
  __device__ static int piece_keys_of(const PrefillOrderParams& params, int tiles, int64_t keys, int longest) {
    const int head_blocks = params.batch.q_heads >> params.heads_shift;
    const int64_t share = keys * head_blocks / params.blocks;
    const int64_t turns = (static_cast<int64_t>(tiles) * head_blocks + params.blocks - 1) / params.blocks;
    if (turns * longest <= share + share / 16) return 0;
    return static_cast<int>(max(share / kPieces, int64_t{1}));
  }

  // Room for the partial results of requests that are to be cut. Whatever finds none stays whole and keeps its bits.
  __device__ static void place_partials(const PrefillOrderParams& params, SharedMemory& shared) {
    const int head_blocks = params.batch.q_heads >> params.heads_shift;
    for (int request = threadIdx.x; request < params.batch.requests; request += kThreads) {
      const RequestView view = at_hand(params) ? shared.views[request] : planned_view(params.batch, request);
      int partial = -1;
      if (has_few_rows(params, view)) {
        const Cut cut = cut_of(params, view, shared.piece_keys);
        const int needed = view.q_len * (cut.end - cut.first);
        if (cut.pieces() > 1) partial = atomicAdd(&shared.placed, needed);
        if (partial + needed > params.most_partials) partial = -1;
      }
      (at_hand(params) ? shared.partials : params.segments.partials)[request] = partial;
      for (int i = 0; i < head_blocks; ++i) params.segments.stored[request * head_blocks + i] = 0;
    }
    __syncthreads();
  }

  // Where place_partials has found room for the request, or -1.
  __device__ static int partial_of(const PrefillOrderParams& params, int request, const SharedMemory& shared) {
    return (at_hand(params) ? shared.partials : params.segments.partials)[request];
  }
  __device__ static bool is_cut(const PrefillOrderParams& params, const RequestView& view,
                                const SharedMemory& shared) {
    return kCut && shared.piece_keys > 0 && view.q_len > 0 && partial_of(params, view.request, shared) >= 0;
  }

  // Tile number `number` of the 1024 requests at hand and its bucket.
  struct Found {
    PrefillTile tile;
    TileSegments segments;
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
    const int own = number - shared.tile_begin[low];
    TileSegments segments = {view.q_begin, view.q_len, view.kv_len, 0, 0, -1};
    if (is_cut(params, view, shared)) {
      const Cut cut = cut_of(params, view, shared.piece_keys);
      segments.begin = cut.first + own * cut.piece;
      segments.end = min(segments.begin + cut.piece, cut.end);
      segments.partial = partial_of(params, view.request, shared);
      const int keys = (segments.end - segments.begin) * params.segment_keys;
      return {{view.request, 0}, segments, min(keys >> shift, kBuckets - 1)};
    }
    const int first = own * params.tokens_per_tile;
    const int last = min(first + params.tokens_per_tile, view.q_len) - 1;
    const Interval keys = visible_keys(params.batch.mask, view, first, last);
    return {{view.request, first}, segments, min((keys.end - keys.begin) >> shift, kBuckets - 1)};
  }

  __device__ static void store_tile(const PrefillOrderParams& params, int place, const Found& found) {
    params.tiles[place] = found.tile;
    if constexpr (kCut) params.segments.tiles[place] = found.segments;
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
    const bool beside = params.batch.most_q_len > 0;  // another kernel, which shares the L2
    const int64_t section_bytes = kSectionBytes / (beside ? 2 : 1);
    const int64_t few = kSectionSequences / max(params.batch.requests << params.heads_shift, 1);
    const int64_t heads =
        head_bytes > 0 ? max(section_bytes / head_bytes, min(2 * section_bytes / head_bytes, few)) : 1;
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
    if (threadIdx.x == 0) shared.longest = shared.placed = shared.piece_keys = shared.any_few = 0;
    __syncthreads();
    int64_t sum = load_all(params, shared);
    if constexpr (kCut) {
      const int piece_keys = piece_keys_of(params, tiles_of(sum), keys_of(sum), shared.longest);
      if (shared.any_few && piece_keys > 0) {
        if (threadIdx.x == 0) shared.piece_keys = piece_keys;
        __syncthreads();
        place_partials(params, shared);
        sum = load_all(params, shared);
      }
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
      if (static_cast<int>(threadIdx.x) < tiles) store_tile(params, shared.next[own.bucket] + place, own);
    } else {
      for_each_tile(params, sum, shift, shared, [&](const Found& found) {
        store_tile(params, atomicAdd(&shared.next[found.bucket], 1), found);
      });
    }
    if (threadIdx.x == kThreads - 1) *params.order = order_of(params, tiles, keys_of(sum));
  }

  __device__ static void run(const Params& params) {
    run_plan(params, [&] { order(params.plan); });
  }
};

template <int kThreads, Tiles kTiles>
using Config = PrefillOrderConfig<kThreads, kTiles>;

}  // namespace fovea::kernels::cuda
