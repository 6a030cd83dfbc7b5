// SPDX-License-Identifier: Apache-2.0
// Tiles, stages, registers and shared memory of prefill whose keys threads bring or widen. The
// reasons for its numbers are in docs/kernels/prefill_gather.md.
#pragma once

#include "kernels/cuda/common/conditional.cuh"
#include "kernels/cuda/sm90/common/slots.cuh"
#include "kernels/cuda/sm90/prefill_gather/slots.cuh"

namespace fovea::kernels::cuda {

template <class Head, class Elements, Loader kLoad, Scores kScores, Sums kSums>
struct PrefillGatherConfig : Axes<Head, Elements, kLoad, kScores, kSums> {
  using Base = Axes<Head, Elements, kLoad, kScores, kSums>;
  using Base::kHeadDim, Base::kHeadDimV, Base::kMasked, Base::kWiden, Base::kParts, Base::kBoxes;
  static_assert(Base::kRows && !Base::kNarrow && !Base::kExponents && !Base::kSegments);
  static_assert(kHeadDim % kSwizzledColumns == 0 && kHeadDimV % kSwizzledColumns == 0);
  static_assert(!kParts || kScores == plain || kScores == masked);
  using Params = PrefillParams;
  static constexpr bool kTokens = kLoad == tokens;
  static constexpr bool kFindsRows = kLoad == rows;  // a warp finds rows, others copy them
  static_assert(!kTokens || (!kWiden && kScores == plain && kSums == whole));
  static_assert(!kBoxes || (kWiden && kHeadDim == kSwizzledBytes && kHeadDimV == kSwizzledBytes));

  static constexpr int kConsumers = kSums == few_parts ? 1 : 2;
  // Consumers issue their products in turns.
  static constexpr bool kTurns = kHeadDim <= 128 && kConsumers > 1;
  static constexpr int kKeys = kHeadDim <= 64    ? 128
                               : kHeadDim <= 128 ? (kMasked ? 96 : 128)
                               : kHeadDim <= 192 ? (kMasked || kWiden ? 64 : 96)
                                                 : (kWiden ? 48 : 64);
  static constexpr bool kInPlace = false;
  static constexpr bool kStoresApart = false;
  static constexpr int kStages = kHeadDim <= 64 ? 3 : 2;
  static constexpr int kKeyStages = kStages;
  static constexpr bool kQueryRegisters = kHeadDim <= 128 && !kMasked && !kWiden && kConsumers == 2;
  static constexpr int kQueryRegisterSteps = kQueryRegisters ? kHeadDim / 16 : 0;
  static constexpr bool kQueryRing = false;
  static constexpr int kQueryStages =
      kConsumers == 1 || (kHeadDim <= 128 && !kQueryRegisters && !kWiden) ? 2 : 1;
  // A warpgroup of its own widens fp8 values and multiplies them by the scales of their keys. Masks
  // leave no registers for it.
  static constexpr bool kWidensApart = kBoxes && !kMasked && kConsumers > 1;
  static constexpr int kWarpgroups = kConsumers + (kWidensApart ? 2 : 1);
  // A block of three warpgroups starts with 168 registers a thread, of four with 128.
  static constexpr int kProducerRegisters = kConsumers == 1            ? 128
                                            : kWiden && kHeadDim > 128 ? 72
                                            : kMasked                  ? 72
                                                                       : 56;
  static constexpr int kConsumerRegisters = kConsumers == 1 ? 240
                                            : kWidensApart  ? 512 / 2 - kProducerRegisters
                                                            : 504 / 2 - kProducerRegisters / 2;

  static constexpr int kDimBlocks = kHeadDim / kSwizzledColumns;
  static constexpr int kDimVBlocks = kHeadDimV / kSwizzledColumns;
  static constexpr bool kStageOut = !kWiden && !kParts;
  static constexpr int kOutBlocks = kHeadDim <= 128 ? kDimVBlocks : 1;  // that a consumer stages
  // Key tiles whose rows are found before they are copied.
  static constexpr int kPlaceSlots = kWiden ? 3 : 6;
  // Scales of keys are copied when the key tile kStages + 5 before has certainly been weighed.
  static constexpr int kScaleSlots = kStages + 5;
  using Raw = RawPieces<kWidensApart, (kHeadDim > kHeadDimV ? kHeadDim : kHeadDimV)>;

  using Slot = Conditional<kParts, PartSlot, TileSlot>;
  using Queries = uint16_t[kDimBlocks][kGroupRows][kSwizzledColumns];  // a consumer's
  struct SharedMemory {
    alignas(1024) Queries q[kQueryStages][kConsumers];
    alignas(1024) uint16_t k[kKeyStages][kDimBlocks][kKeys][kSwizzledColumns];
    alignas(1024) uint16_t v[kStages][kDimVBlocks][kKeys][kSwizzledColumns];
    alignas(1024) uint16_t
        out[kStageOut ? kConsumers : 1][kOutBlocks][kStageOut ? kGroupRows : 1][kSwizzledColumns];
    // fp8 rows as they lie in the cache: K or V of a key tile is a piece.
    alignas(kBoxes ? 1024 : 16)
        uint8_t raw[kWiden ? Raw::kPieces : 1][kWiden ? kKeys : 1][kWiden ? Raw::kRowBytes : 16];
    // One a key, of K and of V.
    alignas(16) float scales[kWiden ? kScaleSlots : 1][2][kWiden ? kKeys : 4];
    float value_units[kWidensApart ? kScaleSlots : 1];  // units of values times their scales
    float q_unit[kWiden ? kConsumers : 1][kMasked && !kWiden ? 1 : kGroupRows];
    // Rows of some key tiles in memory; null: the request does not own the key.
    const char* k_places[kFindsRows ? kPlaceSlots : 1][kFindsRows ? kKeys : 1];
    const char* v_places[kFindsRows ? kPlaceSlots : 1][kFindsRows ? kKeys : 1];
    int begun[kPlaceSlots];  // row tile that each of these key tiles begins
    [[no_unique_address]] Conditional<kFindsRows, WholeTiles<kPlaceSlots>, Nothing> whole;
    Slot tiles[kTileSlots];
    TransactionBarrier q_full[kQueryStages][kConsumers], q_empty[kQueryStages][kConsumers];
    TransactionBarrier k_full[kKeyStages], k_empty[kKeyStages];
    TransactionBarrier v_full[kStages], v_empty[kStages];
    TransactionBarrier raw_full[Raw::kBarriers], raw_empty[Raw::kBarriers];
    TransactionBarrier places_full[kPlaceSlots], places_empty[kPlaceSlots];
    TransactionBarrier tile_full[kTileSlots], tile_empty[kTileSlots];
    [[no_unique_address]] Conditional<kMasked, MaskMemory<kConsumers, (kKeys + 31) / 32>, Nothing>
        masks;
    [[no_unique_address]] Conditional<kTokens, TokenMemory<kKeys>, Nothing> tokens;
  };
  static_assert(sizeof(SharedMemory) <= kMaxSharedBytes);

  __device__ __forceinline__ static Queries& queries(SharedMemory& shared, int stage,
                                                     int consumer) {
    return shared.q[stage][consumer];
  }
  // Returns where a consumer's out is staged.
  template <class Memory>
  __device__ __forceinline__ static auto& out(Memory& shared, int consumer) {
    return shared.out[consumer];
  }

  static constexpr int kBlocksPerSm = 1;
  static constexpr KernelTraits kTraits = {kWarpgroups * kWarpgroupThreads, sizeof(SharedMemory),
                                           kConsumers* kGroupRows, kKeys};
  __device__ __forceinline__ static void run(const Params& params);
};

}  // namespace fovea::kernels::cuda
