// SPDX-License-Identifier: Apache-2.0
// Producer warps that copy rows of K and V one by one, from pages of a few tokens and from fp8
// caches. One warp finds the rows (locate_rows.cuh), three copy them, 16 bytes a lane. 16-bit rows
// go straight to their swizzled places. fp8 rows become pieces of raw bytes: two are being copied
// while one is widened to f16. Keys that the request does not own or that have left its window
// become zeros.
#pragma once

#include "kernels/cuda/sm90/common/fp8.cuh"
#include "kernels/cuda/sm90/prefill_gather/locate_rows.cuh"

namespace fovea::kernels::cuda {

constexpr int kLoaderWarps = 3;
constexpr int kLoaderThreads = 32 * kLoaderWarps;
// Warps that widen values.
template <class Config>
constexpr int kValueWarps = Config::kWidensApart ? 4 : kLoaderWarps;

// Returns the thread's number among the loaders, 0 to 95: warp 1 of the producer finds rows. In a
// warpgroup that only widens it is 0 to 127.
__device__ __forceinline__ int loader_thread() {
  const int thread = threadIdx.x;
  return thread < 32                  ? thread
         : thread < kWarpgroupThreads ? thread - 32
                                      : thread % kWarpgroupThreads;
}
__device__ __forceinline__ void loaders_meet() { named_barrier_wait(kLoaders, kLoaderThreads); }

// Rows of kBytes and their places in shared memory: rows that are 8 apart lie 8 * kPitch bytes
// apart, chunks that are kLanes apart kNext bytes. kLanes neighbouring lanes copy a row.
template <int kRowBytes, int kRowPitch, int kChunkPitch>
struct RowLayout {
  static constexpr int kBytes = kRowBytes;
  static constexpr int kPitch = kRowPitch;
  static constexpr int kNext = kChunkPitch;
  static constexpr int kLanes = kRowBytes % 128 == 0 ? 8 : 4;
};

// Copies kKeys rows, of which `live_bytes` exist. to(row, chunk) returns the place of 16 bytes. A
// warp takes every third group of 8 rows, so that a lane's places differ by constants. kWhole: all
// rows and their bytes are live.
template <class Layout, bool kWhole, int kKeys, typename To>
__device__ __forceinline__ void copy_live_rows(const char* const (&places)[kKeys], int live_bytes,
                                               To to) {
  constexpr int kLanes = Layout::kLanes;
  constexpr int kRowsOfLane = kLanes / 4;  // rows of a lane in a group
  constexpr int kGroups = kKeys / 8;
  const int warp = loader_thread() / 32;
  const int lane = threadIdx.x % 32;
  const auto row_of = [&](int i) { return warp * 8 + i * (32 / kLanes) + lane / kLanes; };
  uint32_t first[kRowsOfLane];
#pragma unroll
  for (int i = 0; i < kRowsOfLane; ++i) first[i] = shared_address(to(row_of(i), lane % kLanes));
#pragma unroll
  for (int group = 0; group < kGroups; group += kLoaderWarps) {
    if (group + kLoaderWarps > kGroups && warp + group >= kGroups) break;
    // Addresses come first: a copy reads its registers late, and writes to them would wait for it.
    const char* from[kRowsOfLane];
    bool live[kRowsOfLane];
#pragma unroll
    for (int i = 0; i < kRowsOfLane; ++i) {
      from[i] = places[row_of(i) + group * 8];
      live[i] = from[i] != nullptr;
      from[i] += lane % kLanes * 16;
    }
#pragma unroll
    for (int i = 0; i < kRowsOfLane; ++i) {
#pragma unroll
      for (int chunk = 0; chunk < Layout::kBytes / 16; chunk += kLanes) {
        const uint32_t at = first[i] + group * 8 * Layout::kPitch + chunk / kLanes * Layout::kNext;
        if constexpr (kWhole) {
          copy_line_async(at, from[i] + chunk * 16);
        } else {
          copy_line_or_zero_async(at, from[i] + chunk * 16,
                                  live[i] && (chunk + lane % kLanes) * 16 < live_bytes);
        }
      }
    }
  }
}

// Key tiles between a request's first and last take half the instructions.
template <class Layout, int kKeys, typename To>
__device__ __forceinline__ void copy_rows(const char* const (&places)[kKeys], bool whole,
                                          int live_bytes, To to) {
  if (whole && live_bytes == Layout::kBytes) {
    copy_live_rows<Layout, true>(places, live_bytes, to);
  } else {
    copy_live_rows<Layout, false>(places, live_bytes, to);
  }
}

template <int kColumnBlocks, int kKeys>
__device__ __forceinline__ uint16_t* swizzled(
    uint16_t (&tile)[kColumnBlocks][kKeys][kSwizzledColumns], int row, int chunk) {
  return &tile[chunk / 8][row][(chunk % 8 ^ row % 8) * 8];
}

template <class Config, int kDim>
__device__ __forceinline__ void gather_tile(
    const char* const (&places)[Config::kKeys], bool whole, int live_dim,
    uint16_t (&to)[kDim / kSwizzledColumns][Config::kKeys][kSwizzledColumns],
    TransactionBarrier& full) {
  copy_rows<RowLayout<2 * kDim, kSwizzledBytes, sizeof(to[0])>>(
      places, whole, 2 * live_dim, [&](int row, int chunk) { return swizzled(to, row, chunk); });
  full.arrive_after_copies();
}

template <class Config>
__device__ __forceinline__ void release_places(typename Config::SharedMemory& shared, int slot) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) shared.places_empty[slot].arrive();
}

// Copies 16-bit rows. Values follow the keys of the next key tile, in the order that consumers read
// them. Three warps run it.
template <class Config>
__device__ void gather_rows(const PrefillParams& params, typename Config::SharedMemory& shared) {
  const AttentionParams& attention = params.attention;
  Ring<Config::kStages> k, v;
  Ring<Config::kPlaceSlots> places;
  Ring<Config::kQueryStages> q;
  const auto gather_values = [&](int slot) {
    shared.v_empty[v.stage].wait(v.phase ^ 1);
    gather_tile<Config, Config::kHeadDimV>(shared.v_places[slot], shared.whole.at[slot],
                                           attention.head_dim_v, shared.v[v.stage],
                                           shared.v_full[v.stage]);
    v.advance();
    release_places<Config>(shared, slot);
  };
  for (bool first = true;; first = false) {
    shared.places_full[places.stage].wait(places.phase);
    const int begun = shared.begun[places.stage];
    if (begun != kNoMoreTiles) {
      shared.k_empty[k.stage].wait(k.phase ^ 1);
      gather_tile<Config, Config::kHeadDim>(shared.k_places[places.stage],
                                            shared.whole.at[places.stage], attention.head_dim,
                                            shared.k[k.stage], shared.k_full[k.stage]);
      k.advance();
      if (begun != kSameTile && threadIdx.x < 32) {
        load_queries_boxes<Config>(params, shared, shared.tiles[begun].work, q);
      }
    }
    if (!first) gather_values(places.previous().stage);
    if (begun == kNoMoreTiles) break;
    places.advance();
  }
  wait_copies<0>();
}

// Returns where a chunk of an fp8 row waits. Rows with even and odd numbers lie in different halves
// of 128 bytes, so that eight threads that widen four chunks of both never share a bank.
template <int kKeys, int kRowBytes>
__device__ __forceinline__ uint8_t* raw_chunk(uint8_t (&piece)[kKeys][kRowBytes], int bytes,
                                              int row, int chunk) {
  const int flip = bytes % 128 == 0 ? row % 2 * 4 : 0;
  return &piece[0][0] + row * bytes + (chunk ^ flip) * 16;
}

// Widens 16 values of a row to their swizzled places. kScaled: multiplies them by `scale`, which
// holds the same f16 twice.
template <Type kFrom, bool kScaled>
__device__ __forceinline__ void store_wide(const uint4& raw, uint32_t scale, uint16_t* first,
                                           uint16_t* second) {
  const auto wide = [&](uint32_t low, uint32_t high) {
    uint4 values = {widen<kFrom>(low), widen_upper<kFrom>(low), widen<kFrom>(high),
                    widen_upper<kFrom>(high)};
    if constexpr (kScaled) {
      for (uint32_t* two : {&values.x, &values.y, &values.z, &values.w})
        *two = multiply_f16(*two, scale);
    }
    return values;
  };
  *reinterpret_cast<uint4*>(first) = wide(raw.x, raw.y);
  *reinterpret_cast<uint4*>(second) = wide(raw.z, raw.w);
}

// Widens a landed piece into a stage. A warp takes 8 rows of 4 chunks at a time. Boxes lie
// swizzled. kLive: all rows are live; otherwise rows outside `live` become zeros. kScaled:
// multiplies values by their scales over `unit`.
template <class Config, int kBytes, int kWarps, bool kLive, bool kScaled>
__device__ __forceinline__ void widen_rows_of_piece(
    uint8_t (&piece)[Config::kKeys][Config::Raw::kRowBytes],
    uint16_t (&to)[kBytes / kSwizzledColumns][Config::kKeys][kSwizzledColumns], Interval live,
    const float* scales, float unit) {
  const float factor = 1 / unit;
  constexpr int kGroups = Config::kKeys / 8;
  constexpr bool kEven = kGroups % kWarps == 0;
  constexpr int kBatch = kWarps;  // words loaded before the first is stored
  const int lane = threadIdx.x % 32;
  int warp = loader_thread() / 32;
#pragma unroll 1
  for (int quad = 0; quad < kBytes / 64; ++quad) {
    const int row = warp * 8 + (Config::kBoxes ? lane % 8 : lane / 4);
    const int chunk = quad * 4 + (Config::kBoxes ? lane / 8 : lane % 4);
    const uint8_t* from =
        Config::kBoxes ? &piece[row][(chunk ^ row % 8) * 16] : raw_chunk(piece, kBytes, row, chunk);
    uint16_t* first = swizzled(to, row, 2 * chunk);
    uint16_t* second = swizzled(to, row, 2 * chunk + 1);
#pragma unroll
    for (int group = 0; group < kGroups; group += kBatch * kWarps) {
      uint4 words[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int at = group + i * kWarps;
        if (kEven ? at < kGroups : at + warp < kGroups)
          words[i] = *reinterpret_cast<const uint4*>(from + at * 8 * kBytes);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int at = group + i * kWarps;
        if (kEven ? at >= kGroups : at + warp >= kGroups) break;
        uint4 w = words[i];
        if (!kLive && (row + at * 8 < live.begin || row + at * 8 >= live.end)) w = {};
        uint32_t scale = 0;
        if constexpr (kScaled) {
          const float relative = scales[row + at * 8] * factor;
          scale = pack<f16>(relative, relative);
        }
        store_wide<Config::kKv, kScaled>(w, scale, first + at * 8 * kSwizzledColumns,
                                         second + at * 8 * kSwizzledColumns);
      }
    }
    if constexpr (!kEven)
      warp = warp == 0 ? kWarps - 1 : warp - 1;  // the first warps have one more group
  }
}

// `scales` of values are relative to `unit`; null: there are none.
template <class Config, int kBytes, int kWarps = kLoaderWarps>
__device__ __forceinline__ void widen_piece(
    uint8_t (&piece)[Config::kKeys][Config::Raw::kRowBytes],
    uint16_t (&to)[kBytes / kSwizzledColumns][Config::kKeys][kSwizzledColumns], Interval live = {},
    const float* scales = nullptr, float unit = 1) {
  const bool all_live = !Config::kBoxes || (live.begin <= 0 && live.end >= Config::kKeys);
  if (scales && all_live) {
    widen_rows_of_piece<Config, kBytes, kWarps, true, true>(piece, to, live, scales, unit);
  } else if (scales) {
    widen_rows_of_piece<Config, kBytes, kWarps, false, true>(piece, to, live, scales, unit);
  } else if (all_live) {
    widen_rows_of_piece<Config, kBytes, kWarps, true, false>(piece, to, live, scales, unit);
  } else {
    widen_rows_of_piece<Config, kBytes, kWarps, false, false>(piece, to, live, scales, unit);
  }
  fence_async_proxy();
}

template <class Config, int kDim>
__device__ __forceinline__ void copy_piece(const char* const (&places)[Config::kKeys], bool whole,
                                           int live_dim,
                                           uint8_t (&to)[Config::kKeys][Config::Raw::kRowBytes]) {
  copy_rows<RowLayout<kDim, kDim, 16 * (kDim % 128 == 0 ? 8 : 4)>>(
      places, whole, live_dim, [&](int row, int chunk) { return raw_chunk(to, kDim, row, chunk); });
}

// Widens fp8 rows: each turn of the loop widens K and V of one key tile while those of the next are
// being copied. Three warps run it.
template <class Config>
__device__ void widen_rows(const PrefillParams& params, typename Config::SharedMemory& shared) {
  const AttentionParams& attention = params.attention;
  Ring<Config::kStages> stages;
  Ring<Config::kQueryStages> q;
  Ring<Config::Raw::kPieces> to;     // place of the next copy, after which comes the oldest piece
  Ring<Config::kPlaceSlots> places;  // place of the next key tile
  int begun;                         // row tile that the next key tile begins
  const auto find_next = [&] {
    shared.places_full[places.stage].wait(places.phase);
    begun = shared.begun[places.stage];
  };
  const auto copy_k = [&] {
    if (begun != kNoMoreTiles) {
      copy_piece<Config, Config::kHeadDim>(shared.k_places[places.stage],
                                           shared.whole.at[places.stage], attention.head_dim,
                                           shared.raw[to.stage]);
    }
    commit_copies();
    to.advance();
  };
  const auto copy_v = [&] {
    if (begun != kNoMoreTiles) {
      copy_piece<Config, Config::kHeadDimV>(shared.v_places[places.stage],
                                            shared.whole.at[places.stage], attention.head_dim_v,
                                            shared.raw[to.stage]);
      release_places<Config>(shared, places.stage);
      places.advance();
    }
    commit_copies();
    to.advance();
  };
  // Afterwards the oldest piece has landed, and the one before it has been widened.
  const auto await_piece = [&] {
    wait_copies<Config::Raw::kPieces - 2>();
    loaders_meet();
  };

  find_next();
  copy_k();
  copy_v();
  while (begun != kNoMoreTiles) {
    const int own = begun;
    find_next();
    await_piece();
    copy_k();
    shared.k_empty[stages.stage].wait(stages.phase ^ 1);
    widen_piece<Config, Config::kHeadDim>(shared.raw[to.stage], shared.k[stages.stage]);
    shared.k_full[stages.stage].arrive();
    if (own != kSameTile && threadIdx.x < 32) {
      load_queries_boxes<Config>(params, shared, shared.tiles[own].work, q);
    }
    await_piece();
    copy_v();
    shared.v_empty[stages.stage].wait(stages.phase ^ 1);
    widen_piece<Config, Config::kHeadDimV>(shared.raw[to.stage], shared.v[stages.stage]);
    shared.v_full[stages.stage].arrive();
    stages.advance();
  }
  wait_copies<0>();
}

}  // namespace fovea::kernels::cuda
