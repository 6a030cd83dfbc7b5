// SPDX-License-Identifier: Apache-2.0
// Producer warps of boxes: one takes row tiles and copies q, one copies K and one copies V.
#pragma once

#include "kernels/cuda/sm90/common/find_masks.cuh"
#include "kernels/cuda/sm90/common/load_boxes.cuh"
#include "kernels/cuda/sm90/common/tile_taker.cuh"

namespace fovea::kernels::cuda {

// Fetches tensor maps before the first box needs them.
template <class Config>
__device__ __forceinline__ void prefetch_maps(const PrefillParams& params) {
  prefetch_tensor_map(params.q);
  prefetch_tensor_map(params.k);
  prefetch_tensor_map(params.v);
  if constexpr (Config::kStageOut) prefetch_tensor_map(params.out);
  if (params.shared_blocks > 0) prefetch_tensor_map(params.shared_k);
}

// Copies the queries of a row tile; a lane copies those of a consumer. A warp calls it.
template <class Config>
__device__ __forceinline__ void load_queries_boxes(const PrefillParams& params,
                                                   typename Config::SharedMemory& shared,
                                                   const WorkTile& tile,
                                                   Ring<Config::kQueryStages>& q) {
  const int w = threadIdx.x % 32;
  if (w < Config::kConsumers) {
    TransactionBarrier& full = shared.q_full[q.stage][w];
    shared.q_empty[q.stage][w].wait(q.phase ^ 1);
    full.arrive_expecting(sizeof(shared.q[0][0]));
    const int token = tile.q_begin + tile.first_token + w * (kGroupRows >> params.heads_shift);
#pragma unroll
    for (int c = 0; c < Config::kDimBlocks; ++c) {
      load_box(shared.q[q.stage][w][c], params.q, full, kEvictFirst, c * kSwizzledColumns,
               tile.q_head, token);
    }
  }
  __syncwarp();
  q.advance();
}

// Copies the queries of a row tile through a stage of keys. A warp calls it.
template <class Config>
__device__ __forceinline__ void load_query_stage(const PrefillParams& params,
                                                 typename Config::SharedMemory& shared,
                                                 const WorkTile& tile,
                                                 Ring<Config::kKeyStages>& at) {
  const int lane = threadIdx.x % 32;
  TransactionBarrier& full = shared.k_full[at.stage];
  shared.k_empty[at.stage].wait(at.phase ^ 1);
  if (lane == 0) full.arrive_expecting(sizeof(shared.k[0]));
  __syncwarp();
  if (lane < Config::kConsumers * Config::kDimBlocks) {
    const int consumer = lane / Config::kDimBlocks;
    const int c = lane % Config::kDimBlocks;
    const int token =
        tile.q_begin + tile.first_token + consumer * (kGroupRows >> params.heads_shift);
    load_box(Config::queries(shared, at.stage, consumer)[c], params.q, full, kEvictFirst,
             c * kSwizzledColumns, tile.q_head, token);
  }
  __syncwarp();
  at.advance();
}

// Takes row tiles before the copies need them, which hides the chain of loads of a tile, and copies
// the queries of the next one. A warp runs it.
template <class Config>
__device__ void take_tiles(const PrefillParams& params, typename Config::SharedMemory& shared) {
  TileTaker<Config> taker{params, shared};
  Ring<Config::kQueryStages> q;
  while (true) {
    const WorkTile& tile = taker.take();
    if (tile.request < 0) break;
    if constexpr (!Config::kQueryRing) {
      if (kReadsAhead<Config> && !params.keys_last) await_inputs(params);
      load_queries_boxes<Config>(params, shared, tile, q);
    }
    taker.claim_next();
  }
  taker.finish();
}

// Copies K, V or both, key tile by key tile; both only if V is transposed afterwards. Otherwise K
// and V have a warp each, as lanes start their boxes one after the other. If no warp is idle, the
// one that copies V finds masks.
template <class Config, bool kOfKeys, bool kOfValues>
__device__ void copy_tiles(const PrefillParams& params, typename Config::SharedMemory& shared) {
  const int lane = threadIdx.x % 32;
  // A concurrent decode streams through the L2, and keys would be fetched again for every row tile.
  const uint64_t policy = params.concurrent ? kEvictLast : kEvictNormal;
  Ring<kTileSlots> slots;
  Ring<kOfKeys ? Config::kKeyStages : Config::kStages> at;
  constexpr bool kFinds = kOfValues && Config::kMasked && !Config::kFindsApart;
  [[maybe_unused]] uint32_t masks_phase = 0;
  while (true) {
    shared.tile_full[slots.stage].wait(slots.phase);
    const WorkTile& tile = shared.tiles[slots.stage].work;
    if (tile.request < 0) break;
    const auto end = [&] {
      if constexpr (Config::kPasses) return tile.block_end + shared.tiles[slots.stage].passed;
      return tile.block_end;
    };
    BoxPlace place = box_place<Config>(params, tile, end() - 1, lane);
    if constexpr (Config::kQueryRing && kOfKeys) load_query_stage<Config>(params, shared, tile, at);
    if constexpr (kReadsAhead<Config>) await_inputs(params);
    for (int block = end() - 1; block >= tile.block_begin; --block) {
      // Prefetched: the latency of the page table is that of half a key tile's products.
      block = pass_hidden<Config>(shared.tiles[slots.stage], block);
      const BoxPlace next = box_place<Config>(
          params, tile, pass_hidden<Config>(shared.tiles[slots.stage], block - 1), lane);
      if constexpr (kOfKeys) {
        shared.k_empty[at.stage].wait(at.phase ^ 1);
        load_key_tile<Config>(params, params.k, tile, block, place, lane, policy,
                              shared.k[at.stage], shared.k_full[at.stage]);
      }
      if constexpr (kFinds) {
        find_masks<Config>(params, shared, shared.tiles[slots.stage], block, masks_phase);
      }
      if constexpr (kOfValues && Config::kNarrow) {
        shared.raw_empty[at.stage].wait(at.phase ^ 1);
        load_key_tile<Config>(params, params.v, tile, block, place, lane, policy,
                              shared.raw_v[at.stage], shared.raw_full[at.stage]);
      } else if constexpr (kOfValues) {
        shared.v_empty[at.stage].wait(at.phase ^ 1);
        load_key_tile<Config>(params, params.v, tile, block, place, lane, policy,
                              shared.v[at.stage], shared.v_full[at.stage]);
      }
      at.advance();
      place = next;
    }
    __syncwarp();
    if (lane == 0) shared.tile_empty[slots.stage].arrive();
    slots.advance();
  }
}

}  // namespace fovea::kernels::cuda
