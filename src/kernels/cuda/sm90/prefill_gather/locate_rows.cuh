// SPDX-License-Identifier: Apache-2.0
// The producer warp that finds the rows of K and V in the cache for those that copy them.
#pragma once

#include "kernels/cuda/sm90/common/copy_tiles.cuh"
#include "kernels/cuda/sm90/prefill_gather/config.cuh"

namespace fovea::kernels::cuda {

// Values of `begun` other than the slot of the row tile that a key tile begins.
constexpr int kSameTile = -1, kNoMoreTiles = -2;

// Finds a request's keys in a cache: a page and a place in it. One warp finds all rows, so there
// are no branches and divisions.
struct RowFinder {
  const int32_t* pages;  // page table of the request
  Interval live;         // keys to be read
  int page_size;
  uint32_t inverse;  // (2^32 - 1) / page_size, rounded down

  struct Row {
    int page;   // may not have arrived when find() returns
    int place;  // -1: the key is not live, and `page` is any page of the request
  };
  __device__ __forceinline__ Row find(int key) const {
    const int within = max(min(max(key, live.begin), live.end - 1), 0);
    int page = __umulhi(within, inverse);  // at most one too small
    int place = within - page * page_size;
    const bool next = place >= page_size;
    page += next;
    place -= next ? page_size : 0;
    return {__ldg(pages + page), key >= live.begin && key < live.end ? place : -1};
  }
};

// The rows of the lane's keys in a key tile: lane, lane + 32 and so on.
template <class Config>
struct RowsOfTile {
  static constexpr int kRows = (Config::kKeys + 31) / 32;
  RowFinder::Row rows[kRows];
  __device__ __forceinline__ void find(const RowFinder& finder, int block) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      rows[i] = finder.find(block * Config::kKeys + static_cast<int>(threadIdx.x) % 32 + i * 32);
    }
  }
};

// Stores the addresses of a key tile's rows, and starts to copy the scales of its keys.
template <class Config>
__device__ __forceinline__ void note_places(const PrefillParams& params,
                                            typename Config::SharedMemory& shared, int kv_head,
                                            const RowsOfTile<Config>& found, int place_slot,
                                            int scale_slot) {
  const KeyParams& keys = params.attention.keys;
  constexpr int kBytes = type_bytes(Config::kKv);
  const char* k = static_cast<const char*>(keys.k) + kv_head * keys.k_head_stride * kBytes;
  const char* v = static_cast<const char*>(keys.v) + kv_head * keys.v_head_stride * kBytes;
#pragma unroll
  for (int i = 0; i < RowsOfTile<Config>::kRows; ++i) {
    const int n = static_cast<int>(threadIdx.x) % 32 + i * 32;
    if (Config::kKeys % 32 != 0 && n >= Config::kKeys) break;
    const auto [page, place] = found.rows[i];
    const bool live = place >= 0;
    const int64_t k_row = page * keys.k_page_stride + place * keys.k_token_stride;
    const int64_t v_row = page * keys.v_page_stride + place * keys.v_token_stride;
    shared.k_places[place_slot][n] = live ? k + k_row * kBytes : nullptr;
    shared.v_places[place_slot][n] = live ? v + v_row * kBytes : nullptr;
    if constexpr (Config::kWiden) {
      if (keys.scale_slot_stride == 0) continue;
      const int64_t slot = page * static_cast<int64_t>(keys.page_size) + place;
      const int64_t at =
          live ? slot * keys.scale_slot_stride + kv_head * keys.scale_head_stride : 0;
      copy_word_async(&shared.scales[scale_slot][0][n], keys.k_scale + at, live ? 4 : 0);
      copy_word_async(&shared.scales[scale_slot][1][n], keys.v_scale + at, live ? 4 : 0);
    }
  }
}

// Takes row tiles, and finds the rows and masks of their key tiles. Rows are found kPlaceSlots key
// tiles before they are copied, and pages are read one key tile before that. Masks come last: their
// memory may wait for what has been handed on. Warp 1 runs it.
template <class Config>
__device__ void locate_rows(const PrefillParams& params, typename Config::SharedMemory& shared) {
  const int lane = threadIdx.x % 32;
  const KeyParams& keys = params.attention.keys;
  const uint32_t inverse = 0xffffffffu / keys.page_size;
  TileTaker<Config> taker{params, shared};
  Ring<Config::kPlaceSlots> places;
  Ring<Config::kScaleSlots> scales;
  [[maybe_unused]] uint32_t masks_phase = 0;
  const auto hand_on = [&](int begun, bool whole) {
    if (lane == 0) {
      shared.begun[places.stage] = begun;
      shared.whole.at[places.stage] = whole;
    }
    if constexpr (Config::kWiden) shared.places_full[places.stage].arrive_after_copies();
    shared.places_full[places.stage].arrive();
    places.advance();
    scales.advance();
  };
  while (true) {
    const int slot = taker.slots.stage;
    int begun = slot;
    const WorkTile& tile = taker.take();
    if (tile.request < 0) break;
    taker.claim_next();
    const RowFinder finder = {keys.page_table + tile.request * keys.page_table_stride,
                              {tile.key_begin, tile.kv_len},
                              keys.page_size,
                              inverse};
    const int kv_head = tile.kv_head, first_block = tile.block_begin;
    RowsOfTile<Config> found;
    found.find(finder, tile.block_end - 1);
    for (int block = tile.block_end - 1; block >= first_block; --block) {
      RowsOfTile<Config> next;
      next.find(finder, block - 1);
      shared.places_empty[places.stage].wait(places.phase ^ 1);
      note_places<Config>(params, shared, kv_head, found, places.stage, scales.stage);
      const int key = block * Config::kKeys;
      hand_on(begun, key >= finder.live.begin && key + Config::kKeys <= finder.live.end);
      if constexpr (Config::kMasked)
        find_masks<Config>(params, shared, shared.tiles[slot], block, masks_phase);
      begun = kSameTile;
      found = next;
    }
  }
  shared.places_empty[places.stage].wait(places.phase ^ 1);
  hand_on(kNoMoreTiles, false);
  wait_copies<0>();
  taker.finish();
}

}  // namespace fovea::kernels::cuda
