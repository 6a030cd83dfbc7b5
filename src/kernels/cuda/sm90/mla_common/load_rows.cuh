// SPDX-License-Identifier: Apache-2.0
// Loads 16-bit keys row by row, for any page size.
#pragma once

#include "kernels/cuda/sm90/mla_common/queries.cuh"

namespace fovea::kernels::cuda {

// Page and position within it of keys that are a tile apart. Stepping avoids two divisions for
// every row and tile.
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

// Where an item's rows are in the cache. Lane i tracks one of the warp's 16 rows of a tile, i % 16,
// and looks up its page one tile early, through the L2 as read_item.
struct RowPlaces {
  int request;
  KeyPlace at;   // the lane's key of the next tile
  int left;      // keys from there to the end; 0 or less: none
  int page = 0;  // page of that key

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
    page = __ldcg(&params.page_table.pages[request * params.page_table.stride + at.number]);
  }
  // Returns the row's byte offset in the cache, or -1 after the last key.
  __device__ __forceinline__ int64_t take(const MlaDecodeParams& params) {
    const int64_t row = left > 0 ? page * params.page_stride + at.place * params.token_stride : -1;
    at.next_tile(params);
    left -= kTileKeys;
    find_page(params);
    return row;
  }
};

// Copies the keys of work items. All warps of the producer.
template <class C>
class RowCopier {
 public:
  using Item = RowPlaces;  // looked up before the producer waits

  __device__ __forceinline__ RowCopier(const MlaDecodeParams& params,
                                       typename C::SharedMemory& shared)
      : params_(params), shared_(shared) {}

  __device__ __forceinline__ Item find(const KeySpan& item) const {
    return RowPlaces(params_, item);
  }
  __device__ __forceinline__ void pass_query_stage(TransactionBarrier& full) const {
    full.arrive();
  }
  __device__ __forceinline__ void load(Item& places, int tiles, Ring<C::kStages>& ring) {
    const int lane = threadIdx.x % 32;
    for (int t = 0; t < tiles; ++t) {
      const int64_t row = places.take(params_);
      const char* from[4];
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int64_t offset = __shfl_sync(~0u, row, 4 * r + lane / 8);
        from[r] =
            offset < 0 ? nullptr : static_cast<const char*>(params_.cache) + offset + lane % 8 * 16;
      }
#pragma unroll
      for (int part = 0; part < C::kTileStages; ++part) {
        shared_.empty[ring.stage].wait(ring.phase ^ 1);
        copy(from, part * C::kStageTiles, shared_.kv[ring.stage]);
        shared_.full[ring.stage].arrive_after_copies();
        ring.advance();
      }
      if constexpr (C::kRopeTiles > 0) {
        shared_.rope_empty[rope_.stage].wait(rope_.phase ^ 1);
        copy(from, C::kLatentTiles, shared_.rope[rope_.stage]);
        shared_.rope_full[rope_.stage].arrive_after_copies();
        rope_.advance();
      }
    }
  }

 private:
  // Copies columns [first_tile * 64, + kTiles * 64) of 64 rows, 8 lanes a row, swizzled as the copy
  // engine does. from[i] is this lane's chunk of its i-th row; null: the row becomes zero.
  template <int kTiles>
  __device__ __forceinline__ static void copy(const char* const (&from)[4], int first_tile,
                                              KeyTiles<kTiles>& to) {
    const uint32_t thread = opaque(threadIdx.x);  // places kept over a tile would not fit registers
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

  const MlaDecodeParams& params_;
  typename C::SharedMemory& shared_;
  Ring<C::kRopeSlots> rope_;
};

// A producer warpgroup that loads work items, queries, and keys row by row through Copier.
template <class C, class Copier>
__device__ __forceinline__ void produce_rows(const MlaDecodeParams& params,
                                             typename C::SharedMemory& shared,
                                             const FirstWork& first) {
  Ring<C::kStages> ring;
  TileReader<C> reader;
  Copier copier(params, shared);
  if (threadIdx.x == 0) {
    const int4 place = first.place;
    shared.next = {place.x + place.z, place.y, place.z, first.rank<C>(), {}};
    announce_tile<C>(params, shared, first.exists() ? &first.item : nullptr, reader.at,
                     first.rank<C>());
  }
  while (true) {
    const RowTile& tile = reader.take(shared);
    const int tiles = tile.tiles;
    if (tiles < 0) break;
    auto keys = copier.find({tile.item.request, tile.item.key_begin, tile.item.key_end});
    wait_for_previous_kernel();
    if (tiles > 0) {
      Ring<C::kStages> place = ring;
#pragma unroll
      for (int t = 0; t < C::kQueries.stages; ++t) {
        shared.empty[place.stage].wait(place.phase ^ 1);
        place.advance();
      }
      if (threadIdx.x % (kWarpgroupThreads / C::kQueries.warps) == 0) {
        uint32_t& q_phase = shared.next.q_phase[threadIdx.x / 32];
        shared.q_empty.wait(q_phase ^ 1);
        q_phase ^= 1;
        const int rank = shared.next.rank;
        load_queries<C>(params, shared, tile.item, rank,
                        QueryPlace::of<C>(params, tile.item, rank, 0), ring);
      }
#pragma unroll
      for (int t = 0; t < C::kQueries.stages; ++t) {
        copier.pass_query_stage(shared.full[ring.stage]);
        ring.advance();
      }
    }
    reader.give_back(shared);
    if (threadIdx.x == 0) {
      auto& next = shared.next;
      announce_tile<C>(params, shared,
                       next.index < next.end ? &params.work.items[next.index] : nullptr, reader.at,
                       next.rank);
      next.index += next.step;
    }
    copier.load(keys, tiles, ring);
  }
  commit_copies();
  wait_copies<0>();
}

}  // namespace fovea::kernels::cuda
