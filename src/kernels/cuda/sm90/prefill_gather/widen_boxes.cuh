// SPDX-License-Identifier: Apache-2.0
// Producer warps for fp8 caches in pages of multiples of 16 tokens: the copy engine brings raw
// rows, K or V of a key tile as a piece, and threads widen them to f16 while it brings the next two
// pieces. Keys that the request does not own or that have left its window become zeros.
#pragma once

#include "kernels/cuda/sm90/prefill_gather/load_rows.cuh"

namespace fovea::kernels::cuda {

// Returns the first of the four keys of a key tile whose scales a lane copies. The others are 4, 8
// and 12 after it, and all lie in one box, because boxes have multiples of 16 keys.
__device__ __forceinline__ int scales_key() {
  const int lane = threadIdx.x % 32;
  return lane / 4 * 16 + lane % 4;
}

// Starts to copy the scales of a key tile. `place` is that of the lane's box, `box` that of
// scales_key().
template <class Config>
__device__ __forceinline__ void copy_scales(const PrefillParams& params,
                                            typename Config::SharedMemory& shared,
                                            const WorkTile& tile, int block, const BoxPlace& place,
                                            int box, int slot) {
  const KeyParams& keys = params.attention.keys;
  if (keys.scale_slot_stride == 0) return;
  const int n = scales_key();
  const int64_t page = __shfl_sync(~0u, place.page, box);
  const int within = __shfl_sync(~0u, place.place, box) + n - box * params.box_keys;
  if (n >= Config::kKeys) return;
  const int64_t at = (page * keys.page_size + within) * keys.scale_slot_stride +
                     tile.kv_head * keys.scale_head_stride;
  const int begin = max(tile.key_begin, tile.block_begin * Config::kKeys);
#pragma unroll
  for (int i = 0; i < 16; i += 4) {
    const int key = block * Config::kKeys + n + i;
    const int bytes = key >= begin && key < tile.kv_len ? 4 : 0;  // with 0 nothing is read
    const int64_t further = int64_t{i} * keys.scale_slot_stride;
    copy_word_async(&shared.scales[slot][0][n + i], keys.k_scale + at + further, bytes);
    copy_word_async(&shared.scales[slot][1][n + i], keys.v_scale + at + further, bytes);
  }
}

// Returns the place of a piece by the number of its barriers.
template <class Config>
__device__ __forceinline__ int piece_of(int barrier) {
  return barrier < Config::Raw::kPieces ? barrier : barrier - Config::Raw::kPieces;
}
// Returns the barriers of the piece that was there before.
template <class Config>
__device__ __forceinline__ Ring<Config::Raw::kBarriers> piece_before(
    const Ring<Config::Raw::kBarriers>& at) {
  const int stage = at.stage - Config::Raw::kPieces;
  if (stage >= 0) return {stage, at.phase};
  return {stage + Config::Raw::kBarriers, at.phase ^ 1};
}

// Takes row tiles and starts their boxes. Warp 1 runs it.
template <class Config>
__device__ void load_raw(const PrefillParams& params, typename Config::SharedMemory& shared) {
  static_assert(Config::kKeys <= 32 / 4 * 16 && Config::kKeys % 16 == 0);
  const int lane = threadIdx.x % 32;
  const int scales_box =
      scales_key() / params.box_keys;  // once, because divisions take many of the warp's few turns
  TileTaker<Config> taker{params, shared};
  Ring<Config::kPlaceSlots> places;
  Ring<Config::kScaleSlots> scales;
  Ring<Config::Raw::kBarriers> pieces;
  [[maybe_unused]] uint32_t masks_phase = 0;
  const auto load_piece = [&](const TensorMap& map, const WorkTile& tile, int block,
                              const BoxPlace& place) {
    const auto before = piece_before<Config>(pieces);
    shared.raw_empty[before.stage].wait(before.phase);
    auto& piece = shared.raw[piece_of<Config>(pieces.stage)];
    auto& to = reinterpret_cast<uint16_t(&)[1][Config::kKeys][kSwizzledColumns]>(piece);
    load_key_tile<Config>(params, map, tile, block, place, lane,
                          params.concurrent ? kEvictLast : kEvictNormal, to,
                          shared.raw_full[pieces.stage]);
    pieces.advance();
  };
  while (true) {
    const int slot = taker.slots.stage;
    int begun = slot;
    const WorkTile tile = taker.take();
    if (tile.request < 0) {
      begun = kNoMoreTiles;
    } else {
      taker.claim_next();
    }
    int block = tile.block_end - 1;
    BoxPlace place;
    if (begun != kNoMoreTiles) place = box_place<Config>(params, tile, block, lane);
    do {
      shared.places_empty[places.stage].wait(places.phase ^ 1);
      if (begun != kNoMoreTiles) {
        copy_scales<Config>(params, shared, tile, block, place, scales_box, scales.stage);
      }
      if (lane == 0) shared.begun[places.stage] = begun;
      shared.places_full[places.stage].arrive_after_copies();
      shared.places_full[places.stage].arrive();
      places.advance();
      scales.advance();
      if (begun == kNoMoreTiles) break;
      begun = kSameTile;
      const BoxPlace next = box_place<Config>(params, tile, block - 1, lane);
      load_piece(params.k, tile, block, place);
      load_piece(params.v, tile, block, place);
      if constexpr (Config::kMasked)
        find_masks<Config>(params, shared, shared.tiles[slot], block, masks_phase);
      place = next;
    } while (--block >= tile.block_begin);
    if (begun == kNoMoreTiles) break;
  }
  wait_copies<0>();
  taker.finish();
}

// Widens pieces of keys, values or both. The producer's three other warps run it, and the warpgroup
// that only widens values if there is one.
template <class Config, bool kOfKeys, bool kOfValues>
__device__ void widen_boxes(const PrefillParams& params, typename Config::SharedMemory& shared) {
  Ring<Config::kStages> stages;
  Ring<Config::kQueryStages> q;
  Ring<Config::Raw::kBarriers> pieces;
  Ring<Config::kPlaceSlots> places;
  Ring<Config::kScaleSlots> scales;
  Interval live = {};  // keys of the request, counted from the key tile's first one
  const bool scaled = Config::kWidensApart && keys_have_scales(params);
  float unit = 1;
  const auto widen_next = [&](auto& to, TransactionBarrier& full, TransactionBarrier& empty,
                              const float* factors) {
    constexpr int kWarps = kOfKeys ? kLoaderWarps : kValueWarps<Config>;
    shared.raw_full[pieces.stage].wait(pieces.phase);
    empty.wait(stages.phase ^ 1);
    widen_piece<Config, Config::kHeadDim, kWarps>(shared.raw[piece_of<Config>(pieces.stage)], to,
                                                  live, factors, unit);
    full.arrive();
    __syncwarp();
    if (threadIdx.x % 32 == 0) shared.raw_empty[pieces.stage].arrive();
  };
  while (true) {
    shared.places_full[places.stage].wait(places.phase);
    const int begun = shared.begun[places.stage];
    release_places<Config>(shared, places.stage);
    places.advance();
    if (begun == kNoMoreTiles) return;
    if (begun == kSameTile) {
      live = {live.begin + Config::kKeys, live.end + Config::kKeys};
    } else {
      const WorkTile& work = shared.tiles[begun].work;
      const int first = (work.block_end - 1) * Config::kKeys;
      live = {work.key_begin - first, work.kv_len - first};
    }
    const float* of_values = nullptr;
    if (scaled) {
      of_values = shared.scales[scales.stage][1];
      unit = values_unit<Config>(of_values, begun == kSameTile ? unit : 0);
      if (kOfKeys && threadIdx.x == 0) shared.value_units[scales.stage] = unit;
      scales.advance();
    }
    if constexpr (kOfKeys) {
      widen_next(shared.k[stages.stage], shared.k_full[stages.stage], shared.k_empty[stages.stage],
                 nullptr);
      if (begun != kSameTile && threadIdx.x < 32) {
        load_queries_boxes<Config>(params, shared, shared.tiles[begun].work, q);
      }
    }
    pieces.advance();
    if constexpr (kOfValues) {
      widen_next(shared.v[stages.stage], shared.v_full[stages.stage], shared.v_empty[stages.stage],
                 of_values);
    }
    pieces.advance();
    stages.advance();
  }
}

}  // namespace fovea::kernels::cuda
