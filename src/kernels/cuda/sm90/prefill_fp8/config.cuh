// SPDX-License-Identifier: Apache-2.0
// Tiles, stages, registers and shared memory of prefill by fp8 products. The reasons for its
// numbers are in docs/kernels/prefill_fp8.md.
#pragma once

#include "kernels/cuda/common/conditional.cuh"
#include "kernels/cuda/sm90/common/slots.cuh"

namespace fovea::kernels::cuda {

// Queries are e4m3 as keys are: half the bytes, twice the rate. V is transposed in shared memory,
// because both operands of such a product run along the summed dimension.
template <class Head, Type kOperand, Scores kScores>
struct PrefillFp8Config : Axes<Head, Types<kOperand, kOperand>, pages, kScores, whole> {
  using Base = Axes<Head, Types<kOperand, kOperand>, pages, kScores, whole>;
  using Base::kHeadDim, Base::kHeadDimV, Base::kMasked;
  static_assert(type_bytes(kOperand) == 1);
  static_assert(kHeadDim % kSwizzledBytes == 0 && kHeadDimV % kSwizzledBytes == 0);
  static_assert(kHeadDim <= 128);
  using Params = PrefillParams;

  static constexpr int kConsumers = kMasked ? 2 : 3;
  static constexpr bool kTurns = true;  // consumers issue their products in turns
  static constexpr int kKeys = 96;
  static constexpr bool kInPlace = false;
  // Out is staged alongside the powers of the next row tile's first softmax, and the warp that
  // takes tiles starts its stores.
  static constexpr bool kStoresApart = !kMasked;
  static constexpr int kStages = kMasked ? 2 : 3;
  static constexpr int kKeyStages = kStages;
  static constexpr bool kQueryRegisters = false;
  static constexpr int kQueryRegisterSteps = 0;
  static constexpr bool kQueryRing = false;
  static constexpr int kQueryStages = 2;
  static constexpr int kTransposers = 2;  // warps that transpose V
  // A block of three warpgroups starts with 168 registers a thread, of four with 128.
  static constexpr int kProducerRegisters = kMasked ? 72 : 56;
  static constexpr int kConsumerRegisters = kMasked ? 504 / 2 - kProducerRegisters / 2 : 152;

  static constexpr int kDimBlocks = kHeadDim / kSwizzledBytes;
  static constexpr int kDimVBlocks = kHeadDimV / kSwizzledBytes;
  static constexpr int kKeyBlocks = (kKeys + kSwizzledBytes - 1) / kSwizzledBytes;
  static constexpr int kOutBlocks = kHeadDimV / kSwizzledColumns;  // that a consumer stages
  static constexpr bool kStageOut = true;

  using Slot = TileSlot;
  using Queries = uint16_t[kDimBlocks][kGroupRows][kSwizzledColumns];  // a consumer's
  struct SharedMemory {
    alignas(1024) Queries q[kQueryStages][kConsumers];
    alignas(1024) uint16_t k[kKeyStages][kDimBlocks][kKeys][kSwizzledColumns];
    alignas(1024) uint16_t v[kStages][kKeyBlocks][kHeadDimV][kSwizzledColumns];
    alignas(1024) uint16_t raw_v[kStages][kDimVBlocks][kKeys][kSwizzledColumns];
    alignas(1024) uint16_t out[kConsumers][kOutBlocks][kGroupRows][kSwizzledColumns];
    Slot tiles[kTileSlots];
    TransactionBarrier q_full[kQueryStages][kConsumers], q_empty[kQueryStages][kConsumers];
    TransactionBarrier k_full[kKeyStages], k_empty[kKeyStages];
    TransactionBarrier v_full[kStages], v_empty[kStages];
    TransactionBarrier raw_full[kStages], raw_empty[kStages];
    TransactionBarrier tile_full[kTileSlots], tile_empty[kTileSlots];
    [[no_unique_address]] Conditional<kMasked, MaskMemory<kConsumers, (kKeys + 31) / 32>, Nothing>
        masks;
    [[no_unique_address]] Conditional<kStoresApart, StoreMemory<kConsumers>, Nothing> stores;
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
  static constexpr KernelTraits kTraits = {(kConsumers + 1) * kWarpgroupThreads,
                                           sizeof(SharedMemory), kConsumers* kGroupRows, kKeys};
  __device__ __forceinline__ static void run(const Params& params);
};

}  // namespace fovea::kernels::cuda
