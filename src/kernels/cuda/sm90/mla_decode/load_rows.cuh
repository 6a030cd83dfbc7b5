// SPDX-License-Identifier: Apache-2.0
// Keys row by row, for any page size.
#pragma once

#include "kernels/cuda/sm90/mla_decode/load.cuh"

namespace fovea::kernels::cuda {

// Columns [first_tile * 64, + kTiles * 64) of 64 rows, 8 lanes a row, swizzled as the copy engine
// does. from[i]: this lane's chunk of its i-th row, null behind the last key: those rows become
// zero.
template <int kTiles>
__device__ __forceinline__ void copy_rows(const char* const (&from)[4], int first_tile,
                                          KeyTiles<kTiles>& to) {
  const uint32_t thread =
      opaque(threadIdx.x);  // places kept over a tile would not fit the registers
  const uint32_t row = thread / 8;
  char* first = reinterpret_cast<char*>(&to.row(0, row)[(thread % 8 ^ row % 8) * 8]);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const char* source = from[i] ? from[i] + first_tile * 128 : nullptr;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      copy_async(first + 16 * i / kGroupKeys * to.kGroupBytes + t * kGroupTileBytes,
                 source ? source + t * 128 : source, source ? 16 : 0);
    }
  }
}

// What a producer has to know of an item.
struct KeySpan {
  int request, key_begin, key_end;
};

// Page and place in it of keys a tile apart, without a division for each: two for every row and
// tile held back the copies.
struct KeyPlace {
  int number, place;  // page of the request; key of the page

  __device__ __forceinline__ KeyPlace(const MlaDecodeParams& params, int key)
      : number(key / params.page_size), place(key - number * params.page_size) {}
  __device__ __forceinline__ void next_tile(const MlaDecodeParams& params) {
    number += params.tile_pages;
    place += params.tile_page_keys;
    if (place >= params.page_size) {
      place -= params.page_size;
      ++number;
    }
  }
};

// Where an item's rows are. Lane i looks after one of the warp's 16 rows of a tile, i % 16, and
// finds its page before the wait for the tile before; from the L2, as read_item.
struct RowPlaces {
  int request;
  KeyPlace at;   // of the next tile
  int left;      // keys from there on, 0 or less behind the last one
  int page = 0;  // of the next tile

  __device__ __forceinline__ RowPlaces(const MlaDecodeParams& params, const KeySpan& item)
      : request(item.request),
        at(params, item.key_begin + row_of_lane()),
        left(item.key_end - item.key_begin - row_of_lane()) {
    find_page(params);
  }
  __device__ __forceinline__ static int row_of_lane() {
    const uint32_t thread = opaque(threadIdx.x);
    return static_cast<int>(thread % 16 / 4 * 16 + thread / 32 * 4 + thread % 4);
  }
  __device__ __forceinline__ void find_page(const MlaDecodeParams& params) {
    if (left <= 0) return;
    page = __ldcg(&params.page_table[request * params.page_table_stride + at.number]);
  }
  // Bytes from the cache's first row on, -1 behind the last key.
  __device__ __forceinline__ int64_t take(const MlaDecodeParams& params) {
    const int64_t row = left > 0 ? page * params.page_stride + at.place * params.token_stride : -1;
    at.next_tile(params);
    left -= kTileKeys;
    find_page(params);
    return row;
  }
};

// What the producer finds out of an item's keys before it waits for anything.
template <class C>
__device__ __forceinline__ auto find_keys(const MlaDecodeParams& params, const KeySpan& item) {
  if constexpr (C::kFp8) {
    return item;
  } else {
    return RowPlaces(params, item);
  }
}

// The keys of one work item row by row, for any page size. All warps of the producer.
template <class C>
__device__ __forceinline__ void copy_keys(const MlaDecodeParams& params,
                                          typename C::SharedMemory& shared, RowPlaces& places,
                                          int tiles, Ring<C::kStages>& ring,
                                          Ring<C::kRopeSlots>& rope) {
  const int lane = threadIdx.x % 32;
  for (int t = 0; t < tiles; ++t) {
    const int64_t row = places.take(params);
    const char* from[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int64_t offset = __shfl_sync(~0u, row, 4 * r + lane / 8);
      from[r] =
          offset < 0 ? nullptr : static_cast<const char*>(params.cache) + offset + lane % 8 * 16;
    }
#pragma unroll
    for (int part = 0; part < 2 * C::kHalfStages; ++part) {
      shared.empty[ring.stage].wait(ring.phase ^ 1);
      copy_rows(from, part * C::kStageTiles, shared.kv[ring.stage]);
      shared.full[ring.stage].arrive_after_copies();
      ring.advance();
    }
    if constexpr (C::kRopeTiles > 0) {
      shared.rope_empty[rope.stage].wait(rope.phase ^ 1);
      copy_rows(from, C::kLatentTiles, shared.rope[rope.stage]);
      shared.rope_full[rope.stage].arrive_after_copies();
      rope.advance();
    }
  }
}

}  // namespace fovea::kernels::cuda
