// SPDX-License-Identifier: Apache-2.0
// Hides keys that rows do not see.
#pragma once

#include "kernels/cuda/sm90/common/find_masks.cuh"
#include "kernels/cuda/sm90/common/row_tile.cuh"

namespace fovea::kernels::cuda {

template <class Config>
__device__ __forceinline__ bool is_open(const RowTile& tile, int block) {
  return is_open(tile.open, block * Config::kKeys, Config::kKeys);
}

// Hides keys by the bits that a producer warp has found.
template <class Config>
__device__ __forceinline__ void hide_unseen(const PrefillParams& params,
                                            typename Config::SharedMemory& shared, int consumer,
                                            Accumulators<Config>& acc) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const auto& words = shared.masks.seen[consumer][opaque(thread_row(half)) >> params.heads_shift];
#pragma unroll
    for (int i = 0; i < Config::kKeys / 4; i += 8) {
      const uint32_t bits =
          load_here(words[i / 8]) >> opaque(static_cast<int>(threadIdx.x % 4 * 2));
#pragma unroll
      for (int n = i; n < i + 8 && n < Config::kKeys / 4; ++n) {
        float& score = acc.scores[n / 2 * 4 + half * 2 + n % 2];
        if (!(bits >> (n % 8 / 2 * 8 + n % 2) & 1)) score = -infinity();
      }
    }
  }
}

// Waits for the mask of a key tile, if it has one. Called before its products are issued, because a
// softmax has no registers for a loop that waits.
template <class Config>
__device__ __forceinline__ void await_mask(typename Config::SharedMemory& shared,
                                           const RowTile& tile, int consumer, int block,
                                           const Accumulators<Config>& acc) {
  if constexpr (Config::kMasked) {
    if (!uniform(is_open<Config>(tile, block))) shared.masks.full[consumer].wait(acc.masks_phase);
  }
}

// Called when the mask of a key tile is no longer needed.
template <class Config>
__device__ __forceinline__ void release_mask(const PrefillParams& params,
                                             typename Config::SharedMemory& shared,
                                             const RowTile& tile, int consumer, int block,
                                             Accumulators<Config>& acc) {
  if constexpr (Config::kMasked) {
    if (uniform(is_open<Config>(tile, block))) return;
    __syncwarp();
    if (threadIdx.x % 32 == 0) shared.masks.empty[consumer].arrive();
    acc.masks_phase ^= 1;
  }
}

// Returns the keys that a row of the thread sees.
template <class Config>
__device__ __forceinline__ Interval thread_keys(const PrefillParams& params, const RowTile& tile,
                                                int consumer, int half) {
  const int row = thread_row(half);
  if constexpr (kFindsKeys<Config>) {
    const int token = (consumer * kGroupRows + row) >> params.heads_shift;
    return static_cast<const typename Config::Slot*>(tile.slot.get())->keys[token];
  }
  return row_keys<Config>(params, *tile.slot, consumer, row);
}

// Hides keys that the rows do not see.
template <class Config>
__device__ __forceinline__ void mask_scores(const PrefillParams& params,
                                            typename Config::SharedMemory& shared,
                                            const RowTile& tile, int consumer, int block,
                                            Accumulators<Config>& acc) {
  const int start = block * Config::kKeys;
  if constexpr (Config::kMasked) {
    // The vote tells the compiler that the branch is uniform: otherwise it serialises products
    // (C7520).
    if (!uniform(is_open<Config>(tile, block))) hide_unseen<Config>(params, shared, consumer, acc);
    return;
  }
  if (is_open<Config>(tile, block)) return;
  const bool from_begin = start >= tile.open.begin;
  const uint32_t thread = opaque(static_cast<int>(threadIdx.x));
  const int column = start + static_cast<int>(thread % 4 * 2);
  int begin[2], end[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int token = thread_row(half, thread) >> params.heads_shift;
    end[half] = min(tile.open.end + token, tile.slot->work.kv_len) - column;
  }
  // With three consumers the shorter way gains nothing, and fp8 products have no registers for both
  // ways.
  if (Config::kConsumers == 3 || !from_begin) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Interval keys = thread_keys<Config>(params, tile, consumer, half);
      begin[half] = keys.begin - column;
      end[half] = keys.end - column;
    }
  }
#pragma unroll
  for (int i = 0; i < Config::kKeys / 2; ++i) {
    if (i / 4 * 8 + i % 2 >= end[i / 2 % 2]) acc.scores[i] = -infinity();
  }
  if (from_begin) return;
#pragma unroll
  for (int i = 0; i < Config::kKeys / 2; ++i) {
    if (i / 4 * 8 + i % 2 < begin[i / 2 % 2]) acc.scores[i] = -infinity();
  }
}

}  // namespace fovea::kernels::cuda
