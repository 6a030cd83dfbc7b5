// SPDX-License-Identifier: Apache-2.0
// Tiles, stages, registers and shared memory of the Hopper prefill kernel. The reasons for its
// numbers are in docs/kernels/prefill.md.
#pragma once

#include "kernels/cuda/common/conditional.cuh"
#include "kernels/cuda/sm90/common/slots.cuh"

namespace fovea::kernels::cuda {

template <class Head, Type kOperand, Loader kLoad, Scores kScores, Sums kSums>
struct PrefillConfig : Axes<Head, Types<kOperand, kOperand>, kLoad, kScores, kSums> {
  using Base = Axes<Head, Types<kOperand, kOperand>, kLoad, kScores, kSums>;
  using Base::kHeadDim, Base::kHeadDimV, Base::kMasked, Base::kPairs, Base::kPasses;
  using Base::kSegments, Base::kParts;
  static_assert(type_bytes(kOperand) == 2 && !Base::kRows && !Base::kExponents);
  static_assert(kHeadDim % kSwizzledColumns == 0 && kHeadDimV % kSwizzledColumns == 0);
  static_assert(!kParts || (kLoad != pairs && (kScores == plain || kScores == masked)));
  static_assert(!kSegments || kHeadDim <= 128);
  static_assert(!kPairs || (kHeadDim >= 128 && kHeadDimV % 128 == 0));
  using Params = PrefillParams;

  // Consumer warpgroups of 64 rows. Head dim 64 leaves registers for three.
  static constexpr int kConsumers = kSums == few_rows || kSums == few_parts || kSums == few_whole
                                        ? 1
                                    : kHeadDim <= 64 && !kMasked && kSums == whole ? 3
                                                                                   : 2;
  // Consumers issue their products in turns.
  static constexpr bool kTurns = kHeadDim <= 128 && kConsumers > 1;
  // Two stages of K and V with queries and out fill shared memory, and the accumulators of scores
  // and out the registers.
  static constexpr int kKeys = kHeadDim <= 64    ? 128
                               : kHeadDim <= 128 ? (kMasked && kSegments ? 96 : 128)
                               : kHeadDim <= 192 ? (kMasked            ? 64
                                                    : kHeadDimV <= 128 ? 128
                                                                       : 96)
                                                 : 64;
  // Scores become weights in place, under the products of the previous values. Keys stay until
  // then, in one more stage.
  static constexpr bool kInPlace = kHeadDim == 128 && !(kMasked && kSegments) && kConsumers > 1;
  // Out is staged alongside the powers of the next row tile's first softmax, and a producer warp
  // starts its stores.
  static constexpr bool kStoresApart = kInPlace && kPairs && !kSegments && !kMasked;
  // With passing, a block gets ahead of the other by a key tile only with a third stage of V. It
  // takes the room of staged out, which goes where the next row tile's queries were.
  static constexpr int kStages =
      kHeadDim <= 64 || kPasses || (kSums == few_parts && kHeadDim <= 128) ? 3 : 2;
  static_assert(!kPasses || (kStoresApart && kKeys == kConsumers * kGroupRows));
  static constexpr int kKeyStages = kInPlace ? 3 : kStages;
  // Products of a key tile's scores, of 32 bytes of the head dim each, whose queries are in
  // registers.
  static constexpr bool kQueryRegisters = kHeadDim <= 128 && !kMasked && kConsumers == 2;
  static constexpr int kQueryRegisterSteps =
      kQueryRegisters       ? kHeadDim / 16
      : kMasked && kInPlace ? 2
                            : (kLatentHeads<kHeadDim, kHeadDimV> && !kMasked ? 6 : 0);
  // Queries come through the ring of keys if sums of segments leave no other room.
  static constexpr bool kQueryRing = kInPlace && kSegments;
  static_assert(!kQueryRing || kConsumers * kGroupRows == kKeys);
  static constexpr int kQueryStages =
      kConsumers == 1 || (kHeadDim <= (kSegments ? 64 : 128) && !kQueryRegisters && !kInPlace) ? 2
                                                                                               : 1;
  // Registers of a thread. A block of three warpgroups starts with 168 each, of four with 128.
  static constexpr int kProducerRegisters = kConsumers == 1 ? 128
                                            : kMasked
                                                ? (Base::kFindsApart && Base::kTransforms ? 56 : 72)
                                            : kConsumers == 3 ? 32
                                                              : 40;
  static constexpr int kConsumerRegisters = kConsumers == 3   ? 160
                                            : kConsumers == 1 ? 240
                                                              : 504 / 2 - kProducerRegisters / 2;

  static constexpr int kDimBlocks = kHeadDim / kSwizzledColumns;
  static constexpr int kDimVBlocks = kHeadDimV / kSwizzledColumns;
  // Blocks of 64 columns of out that a consumer stages at a time.
  static constexpr int kOutBlocks = kHeadDim <= 128               ? kDimVBlocks
                                    : kHeadDim == 256 && !kMasked ? 2
                                                                  : 1;
  static constexpr bool kStageOut = !kParts;  // results of parts are f32
  static constexpr bool kOwnOut = kStageOut && !kPasses;

  using Slot = Conditional<
      kSegments, CutSlot,
      Conditional<kParts, PartSlot,
                  Conditional<kPasses, PassSlot,
                              Conditional<Base::kSkips, SkipSlot,
                                          Conditional<kConsumers == 3, KeysSlot, TileSlot>>>>>;
  using Queries = uint16_t[kDimBlocks][kGroupRows][kSwizzledColumns];  // a consumer's
  struct QueryStages {
    alignas(1024) Queries q[kQueryStages][kConsumers];
  };
  struct Operands : Conditional<kQueryRing, Nothing, QueryStages> {
    alignas(1024) uint16_t k[kKeyStages][kDimBlocks][kKeys][kSwizzledColumns];
    alignas(1024) uint16_t v[kStages][kDimVBlocks][kKeys][kSwizzledColumns];
  };
  struct SharedMemory : Operands {
    // Rows to be stored, or the sum of a row tile's segments before.
    alignas(1024) uint16_t out[kOwnOut ? kConsumers : 1][kOutBlocks * (kSegments ? 2 : 1)]
                              [kOwnOut ? kGroupRows : 1][kSwizzledColumns];
    // Moves the slots off a multiple of 16 bytes, so that threads read them in words. 128-bit reads
    // make launches of about two tiles a block slower (not explained; chosen on H200, 2026-11-29).
    [[no_unique_address]] Conditional<kLatentHeads<kHeadDim, kHeadDimV>, int32_t, Nothing> offset;
    Slot tiles[kTileSlots];
    TransactionBarrier q_full[kQueryStages][kConsumers], q_empty[kQueryStages][kConsumers];
    TransactionBarrier k_full[kKeyStages], k_empty[kKeyStages];
    TransactionBarrier v_full[kStages], v_empty[kStages];
    TransactionBarrier tile_full[kTileSlots], tile_empty[kTileSlots];
    [[no_unique_address]] Conditional<kMasked, MaskMemory<kConsumers, (kKeys + 31) / 32>, Nothing>
        masks;
    [[no_unique_address]] Conditional<kStoresApart, StoreMemory<kConsumers>, Nothing> stores;
    Conditional<kSegments, SegmentMemory<kConsumers>, Nothing> segments;
    Conditional<kPairs, PairMemory, Nothing> pair;
  };
  static_assert(sizeof(SharedMemory) <= kMaxSharedBytes);

  // Returns a consumer's queries in a stage of their own, or of the keys.
  __device__ __forceinline__ static Queries& queries(SharedMemory& shared, int stage,
                                                     int consumer) {
    if constexpr (kQueryRing) {
      return reinterpret_cast<Queries*>(&shared.k[stage])[consumer];
    } else {
      return shared.q[stage][consumer];
    }
  }

  // Returns where a consumer's out is staged.
  template <class Memory>
  __device__ __forceinline__ static auto& out(Memory& shared, int consumer) {
    if constexpr (kPasses) {
      static_assert(kOutBlocks == kDimBlocks && kQueryRegisters && kQueryStages == 1);
      return shared.q[0][consumer];
    } else {
      return shared.out[consumer];
    }
  }

  // Sums of a row tile's segments, in the order of the accumulators.
  using Sum = float4[kHeadDimV / 8][kWarpgroupThreads];
  static_assert(!kSegments || sizeof(Sum) <= sizeof(SharedMemory::out[0]));
  __device__ __forceinline__ static Sum& sum(SharedMemory& shared, int consumer) {
    return reinterpret_cast<Sum&>(shared.out[consumer]);
  }

  static constexpr int kBlocksPerSm = 1;
  static constexpr KernelTraits kTraits = {(kConsumers + 1) * kWarpgroupThreads,
                                           sizeof(SharedMemory),
                                           Base::kBlocks* kConsumers* kGroupRows, kKeys};
  __device__ __forceinline__ static void run(const Params& params);
};

}  // namespace fovea::kernels::cuda
