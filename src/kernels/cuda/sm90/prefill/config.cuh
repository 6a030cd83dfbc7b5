// SPDX-License-Identifier: Apache-2.0
// Tiles, stages, registers and shared memory of the Hopper prefill kernel.
#pragma once

#include "kernels/cuda/common/hopper.cuh"
#include "kernels/cuda/common/prefill_params.h"
#include "kernels/cuda/common/types.cuh"
#include "kernels/cuda/common/visibility.cuh"

namespace fovea::kernels::cuda {

constexpr int kGroupRows = 64;  // query rows of a consumer warpgroup: one wgmma tile
constexpr int kSwizzledColumns = 64;  // 16-bit columns of a 128-byte row
constexpr int kTileSlots = 4;

constexpr int kMostConsumers = 3;

// What one consumer's rows see of a tile's keys.
struct RowsView {
  int32_t open_begin, open_end;  // keys that every row sees
  int32_t columns;               // of the last key tile that some row can see, rounded up to the grain
};

// A tile of work, as the producer hands it to the consumers.
struct TileSlot {
  int32_t request;  // -1: no more work
  int32_t q_begin, q_len, kv_len;
  int32_t first_token;
  int32_t q_head;  // the first
  int32_t kv_head;
  int32_t first_key;  // row of the request's first key, for packed keys
  int32_t key_begin;               // what lies before must not reach a product
  int32_t block_begin, block_end;  // key tiles; at least one
  RowsView rows[kMostConsumers];
};

// plain: a softmax over the keys of one interval per row. general: also masks by predicate, soft cap and
// ALiBi, which cost registers and time.
enum Scores : int { plain, general };

template <int kDim, int kDimV, Type kQuery, Type kCache, Scores kScores>
struct PrefillConfig {
  static_assert(kDim % kSwizzledColumns == 0 && kDimV % kSwizzledColumns == 0);
  static_assert(kQuery == kCache);
  using Params = PrefillParams;
  static constexpr int kHeadDim = kDim;
  static constexpr int kHeadDimV = kDimV;
  static constexpr Type kQ = kQuery;
  static constexpr bool kGeneral = kScores == general;
  // Head dim 64 leaves registers for three, and its powers take as long as its products: 382 TFLOP/s with two,
  // 540 with three that take turns (4x4k, H200, 2026-11-21).
  static constexpr int kConsumers = kDim <= 64 && !kGeneral ? 3 : 2;
  // 3 to 6 % at head dim 128, nothing at 256.
  static constexpr bool kTurns = kDim <= 128;
  // Two stages of K and V beside queries and out fill 227 KB, and the accumulators of scores and out the
  // registers. Head dim 256: 80 keys were 5 % faster packed, but 15 % slower in pages of 64, a copy for every
  // 16 keys.
  static constexpr int kKeys = kDim <= 64      ? 128
                               : kDim <= 128 ? (kGeneral ? 96 : 128)
                               : kDim <= 192 ? (kGeneral ? 64 : 96)
                                             : (kGeneral ? 48 : 64);
  static constexpr int kStages = kDim <= 64 ? 3 : 2;
  // Scores from queries in registers: a quarter less traffic in shared memory, 2 to 7 % faster up to 4096
  // tokens (H200, 2026-11-21).
  static constexpr bool kQueryRegisters = kDim <= 128 && !kGeneral && kConsumers == 2;
  // Grain in keys to which the products of the first key tile of a row tile are cut.
  static constexpr int kGrain = kKeys % 32 == 0 ? 32 : kKeys;
  // A block starts with 168 registers a thread, of three consumers with 128; the roles share the same total.
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : 40;
  static constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : 232;

  // The next tile's queries are loaded while this tile's are read, where there is room.
  static constexpr int kQueryStages = kDim <= 128 && !kQueryRegisters ? 2 : 1;

  // Blocks of 64 columns of out that a consumer stages at once.
  static constexpr int kOutBlocks = kDim <= 128 ? kDimV / kSwizzledColumns : 1;

  static constexpr int kDimBlocks = kDim / kSwizzledColumns;
  static constexpr int kDimVBlocks = kDimV / kSwizzledColumns;

  struct SharedMemory {
    // Blocks of 64 columns, swizzled rows of 128 bytes.
    alignas(1024) uint16_t q[kQueryStages][kConsumers][kDimBlocks][kGroupRows][kSwizzledColumns];
    alignas(1024) uint16_t k[kStages][kDimBlocks][kKeys][kSwizzledColumns];
    alignas(1024) uint16_t v[kStages][kDimVBlocks][kKeys][kSwizzledColumns];
    alignas(1024) uint16_t out[kConsumers][kOutBlocks][kGroupRows][kSwizzledColumns];
    TileSlot tiles[kTileSlots];
    // Keys of the current key tile that each row sees.
    uint32_t seen[kGeneral ? kConsumers : 1][kGroupRows][(kKeys + 31) / 32];
    TransactionBarrier q_full[kQueryStages][kConsumers], q_empty[kQueryStages][kConsumers];
    TransactionBarrier k_full[kStages], k_empty[kStages];
    TransactionBarrier v_full[kStages], v_empty[kStages];
    TransactionBarrier tile_full[kTileSlots], tile_empty[kTileSlots];
  };

  static constexpr int kBlocksPerSm = 1;
  static constexpr KernelTraits kTraits = {(kConsumers + 1) * kWarpgroupThreads,
                                           sizeof(SharedMemory), kConsumers * kGroupRows, kKeys};
  static_assert(sizeof(SharedMemory) <= 232448);
  __device__ static void run(const Params& params);
};

// Position in a ring of stages: full barriers are waited on with phase, empty ones with the other.
template <int kStages>
struct Ring {
  int stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
  __device__ __forceinline__ Ring previous() const {
    return stage == 0 ? Ring{kStages - 1, phase ^ 1} : Ring{stage - 1, phase};
  }
};

template <int kDim, int kDimV, Type kQuery, Type kCache, Scores kScores>
using Config = PrefillConfig<kDim, kDimV, kQuery, kCache, kScores>;

}  // namespace fovea::kernels::cuda
