// SPDX-License-Identifier: Apache-2.0
// Tiles, stages, registers and shared memory of the Hopper prefill kernel.
#pragma once

#include "kernels/cuda/sm90/prefill/handover.cuh"

namespace fovea::kernels::cuda {

// How keys reach shared memory: boxes of pages by the copy engine, or rows one by one by the
// threads of the producer, which also widen fp8 values to f16. pairs: as pages, to both blocks of a
// cluster. passing: as pairs, but a key tile that only the other block's rows see passes a block
// by. boxes: as pages, fp8 values, which threads widen. tokens: as rows, of pages of one token.
enum Loader : int { pages, rows, pairs, boxes, passing, tokens };

// plain: a softmax over the keys of one interval per row. masked: also masks by predicate. sloped:
// also ALiBi. general: also soft caps. Each costs registers, and those without it time: trees of
// drafts took 9 to 12 % more where caps and slopes stood beside, ALiBi 5 % beside caps (H200,
// 2026-11-22). exponents: plain, but scores become exponents of weights while the values of the key
// tile before are still being multiplied, and rows that outgrew their base are found before the
// next turn. A base that rises is subtracted from them then, so bits depend on the key tile that a
// row tile began with. fp8 products 1108 to 1152 TFLOP/s (1x16k), but bf16 at head dims 64, 128 and
// 256 loses 6, 2 and 1 % (H200, 2026-11-23).
enum Scores : int { plain, exponents, masked, sloped, general };

// segments: the keys of a row are summed segment by segment, so that a row tile's segments may be
// computed anywhere and the bits of its rows are the same. few_rows: those bits, for requests with
// up to 64 rows, of which a second consumer would have none; sm90/few_rows has those with up to
// eight. parts: row tiles and their keys are items of portable/plan's list: parts.cuh. few_parts:
// of up to 64 rows. few_whole: as whole, of row tiles of 64 rows, where there is a multiprocessor
// for each.
enum Sums : int { whole, segments, few_rows, parts, few_parts, few_whole };

template <int kDim, int kDimV, Type kQuery, Type kCache, Loader kLoad, Scores kScores, Sums kSums>
struct PrefillConfig {
  static_assert(kDim * type_bytes(kQuery) % kSwizzledBytes == 0);
  static_assert(kDimV * type_bytes(kQuery) % kSwizzledBytes == 0);
  using Params = PrefillParams;
  static constexpr int kHeadDim = kDim;
  static constexpr int kHeadDimV = kDimV;
  static constexpr Type kQ = kQuery;
  static constexpr bool kBoxes = kLoad == boxes;
  static constexpr bool kTokens = kLoad == tokens;
  static constexpr bool kFindsRows = kLoad == rows;  // a warp does, for those who copy them
  static constexpr bool kRows = kFindsRows || kBoxes || kTokens;  // threads write K and V
  // Blocks of a cluster, which take neighbouring row tiles as one.
  static constexpr bool kPasses = kLoad == passing;
  static constexpr bool kPairs = kLoad == pairs || kPasses;
  static constexpr int kBlocks = kPairs ? 2 : 1;
  // Consumers give the last key tiles back unread of which their rows see nothing: without a group
  // a pair's four have 256 tokens, and key tiles 64 or 128 keys.
  static constexpr bool kOwnEnds =
      kLoad == pairs && kDim > 128 && kScores == plain&& kSums == whole;
  static constexpr bool kMasked = kScores != plain && kScores != exponents;
  static constexpr bool kExponents = kScores == exponents;
  static constexpr bool kCaps = kScores == general;
  static constexpr bool kTransforms = kScores == sloped || kCaps;
  static constexpr bool kParts = kSums == parts || kSums == few_parts;
  static_assert(!kParts || (kLoad != pairs && (kScores == plain || kScores == masked) &&
                            type_bytes(kQuery) == 2));
  static constexpr bool kWhole = kSums == whole || kSums == few_whole;
  static constexpr bool kSegments = !kWhole && !kParts;
  static_assert(!kSegments || (kLoad != rows && type_bytes(kCache) == 2 && kDim <= 128));
  // The warps that take tiles and copy boxes read the list and the page table before they wait for
  // the kernel ahead.
  static constexpr bool kReadsAhead = (kWhole || kParts) && !kRows;
  static constexpr bool kFp8 = type_bytes(kCache) == 1;
  // Queries are e4m3 too, and so are the products: half the bytes, twice the rate. V is transposed
  // on its way, because both operands of such a product run along the summed dimension.
  static constexpr bool kNarrow = type_bytes(kQuery) == 1;
  // Values of an fp8 cache are exact in f16, so the products are of f16, and bf16 queries become
  // f16 relative to a power of two near their row's largest value.
  static constexpr bool kWiden = kFp8 && !kNarrow;
  static constexpr int kBytes = type_bytes(kQuery);  // of an element of an operand
  static constexpr Type kOut = kNarrow ? bf16 : kQuery;
  static constexpr Type kKv = kCache;
  static constexpr Type kMath = kWiden ? f16 : kQuery;
  static_assert(kWiden ? kRows : kQuery == kCache);
  static_assert(!kExponents || (kNarrow && kSums == whole));
  static_assert(!kTokens || (type_bytes(kCache) == 2 && kScores == plain && kSums == whole));
  static_assert(!kBoxes || (kWiden && kDim == kSwizzledBytes && kDimV == kSwizzledBytes));
  static_assert(!kPairs || (kDim >= 128 && kDimV % 128 == 0 && !kNarrow));
  // Weights of a row are relative to 2^-kBias of its largest score in its first key tile. It keeps
  // this base while a thread's weights of a key tile sum up to at most kMostSum, so that most key
  // tiles need no maximum: 8 to 10 % faster from 4096 tokens on (H200, 2026-11-21). f16 and e4m3
  // weights stay finite.
  static constexpr float kBias = kNarrow ? 3 : 0;
  static constexpr float kMostSum = kNarrow ? 448 : 4096;
  // Head dim 64 leaves registers for three, and its powers take as long as its products: 382
  // TFLOP/s with two, 540 with three that take turns (4x4k, H200, 2026-11-21). So do those of fp8
  // products: 965 and 1062 (1x16k, 2026-11-22). Threads that gather rows need more registers, and
  // so do sums of segments.
  static constexpr int kConsumers =
      kSums == few_rows || kSums == few_parts || kSums == few_whole     ? 1
      : (kDim <= 64 || kNarrow) && !kMasked && !kRows && kSums == whole ? 3
                                                                        : 2;
  static constexpr bool kWeighsAhead = kConsumers == 3 && !kNarrow;
  // fp8 values in boxes are widened, and multiplied by the scales of their keys, by a warpgroup of
  // their own instead of the warps that widen keys: extends of 536 to 652 TFLOP/s (H200,
  // 2026-11-23). Masks leave no registers for it.
  static constexpr bool kWidensApart = kBoxes && !kMasked && kConsumers > 1;
  static constexpr int kWarpgroups = kConsumers + (kWidensApart ? 2 : 1);
  static constexpr int kValueWarps = kWidensApart ? 4 : 3;  // that widen values
  // A consumer without another weighs scores while its own values are multiplied.
  static constexpr bool kAlone = kSums == few_rows;
  // 3 to 6 % at head dim 128, nothing at 256.
  static constexpr bool kTurns = kDim <= 128 && kConsumers > 1;
  // Two stages of K and V beside queries and out fill 227 KB, and the accumulators of scores and
  // out the registers. Head dims 192/128: 705 TFLOP/s with 128 keys, 601 with 96, which pages of 64
  // cut into boxes of 32 (128 heads 4x4k, H200, 2026-11-22). Head dim 256: 80 keys were 5 % faster
  // packed, but 15 % slower in pages of 64, a copy for every 16 keys.
  static constexpr int kKeys = kDim <= 64 ? 128
                               : kDim <= 128
                                   ? (kNarrow || (kMasked && (kSegments || kRows)) ? 96 : 128)
                               : kDim <= 192 ? (kMasked || kWiden        ? 64
                                                : kDimV <= 128 && !kRows ? 128
                                                                         : 96)
                                             : (kWiden ? 48 : 64);
  // Scores become weights in place, under the products of the values before: 1 to 2 % at head dim
  // 128, a loss of 1 % at 192, 5 % at 64 and 256 (H200, 2026-11-22). Keys stay until then, in one
  // stage more.
  static constexpr bool kInPlace =
      kDim == 128 && !(kMasked && kSegments) && !kRows && !kFp8 && kConsumers > 1;
  // Out is staged beside the powers of the next row tile's first softmax, and a producer warp
  // starts its stores: 1.5 % at 16x1k, 1 % at 8x2k, nothing without pairs (H200, 2026-11-22). Of
  // fp8 products the one that takes tiles: 3 % at 16x1k, 1.7 % at 8x2k, nothing at 1x16k.
  static constexpr bool kTakerStores = kNarrow && !kMasked;
  static constexpr bool kStoresApart =
      (kInPlace && kPairs && !kSegments && !kMasked) || kTakerStores;
  // A block gets ahead of the other by a key tile only with a third stage of V. Its room is that of
  // staged out, which goes where the next row tile's queries lay: they are in registers then.
  static_assert(!kPasses || (kStoresApart && kKeys == kConsumers * kGroupRows));
  static constexpr int kStages = kDim <= 64 || (kNarrow && !kMasked) || kPasses ||
                                         (kSums == few_parts && kDim <= 128 && !kRows)
                                     ? 3
                                     : 2;
  // A producer warp of its own finds masks, where one is idle.
  static constexpr bool kFindsApart = kMasked && !kRows && !kNarrow && !kSegments;
  // The warp that takes tiles finds the keys of each token, else consumers do so at the end of a
  // row tile, when all wait: 8 % with a window of 128 at head dim 64, 1.7 % without one (4x4k,
  // H200, 2026-11-22), 0.3 % of fp8 products. Elsewhere there is no room.
  static constexpr bool kFindsKeys = kConsumers == 3 && !kNarrow;
  // Key tiles between an item and the common prefix are passed over.
  static constexpr bool kSkips = kFindsApart && !kParts;
  // Values are being multiplied into out when a row is found to have outgrown its base.
  static constexpr bool kShrinksLater = kAlone || kInPlace;
  static constexpr int kKeyStages = kInPlace ? 3 : kStages;
  static constexpr bool kOwnValueRing = kInPlace || kPairs;
  // fp8 rows as they lie in the cache, K or V of a key tile a piece: one is widened, two are on
  // their way.
  static constexpr int kPieces = 3;
  // Where different warps widen K and V, each place has barriers for either: of one that both
  // completed the phase would tell neither whose copy has landed.
  static constexpr int kPieceBarriers = kWidensApart ? 2 * kPieces : kPieces;
  static constexpr int kRawBytes = kDim > kDimV ? kDim : kDimV;
  // Scales of keys are copied when the tile kStages + 5 before is weighed for certain.
  static constexpr int kScaleSlots = kStages + 5;
  // Key tiles whose rows are found ahead of their copies. With six 3 to 4 % more up to 2048 tokens
  // than with three (H200, 2026-11-22); raw pieces leave no room for them.
  static constexpr int kPlaceSlots = kRows && !kWiden ? 6 : 3;
  static constexpr int kSegmentBlocks = kSegmentKeys / kKeys;  // key tiles of a segment
  // Scores from queries in registers: a quarter less traffic in shared memory, 2 to 7 % faster up
  // to 4096 tokens (H200, 2026-11-21).
  static constexpr bool kQueryRegisters = kDim <= 128 && !kMasked && !kWiden && kConsumers == 2;
  // How many of the products of a key tile's scores, 32 bytes of the head dim each, take them from
  // there. At head dims 192/128 there is room for half of them: 1 % (H200, 2026-11-22).
  static constexpr int kQueryRegisterSteps =
      kQueryRegisters       ? kDim * kBytes / 32
      : kMasked && kInPlace ? 2
                            : (kLatentHeads<kDim, kDimV> && !kMasked && !kWiden && !kRows ? 6 : 0);
  // Grain in keys to which the products of the first key tile of a row tile are cut.
  static constexpr int kGrain = kKeys % 32 == 0 ? 32 : kKeys;
  // A block of three warpgroups starts with 168 registers a thread, of four with 128; the roles
  // share the same total.
  static constexpr int kProducerRegisters = kConsumers == 1        ? 128
                                            : kWiden && kDim > 128 ? 72
                                            : kMasked ? (kFindsApart&& kTransforms ? 56 : 72)
                                            : kRows || kNarrow ? 56
                                            : kConsumers == 3  ? 32
                                                               : 40;
  static constexpr int kConsumerRegisters = kConsumers == 3   ? (kNarrow ? 152 : 160)
                                            : kConsumers == 1 ? 240
                                            : kWidensApart    ? 512 / 2 - kProducerRegisters
                                                              : 504 / 2 - kProducerRegisters / 2;
  // The compiler is told that a warp's threads are of one consumer, so it finds the addresses of
  // the loop over key tiles once a warp, in uniform registers: 1 to 5 %, 12 % at head dim 64 (H200,
  // 2026-11-23). Parts of gathered rows spill.
  static constexpr bool kUniform = kSums != parts || !kRows;
  // Queries go back behind the loop over key tiles: fp8 products 1057 to 1067 (2x8k), head dim 64
  // 567 to 572, 256 819 to 813 (4x4k, H200, 2026-11-23).
  static constexpr bool kQueriesBehindLoop = kConsumers == 3;
  // These hold one row tile at a time: the next begins when the values of the last have landed.
  static constexpr bool kTight = kConsumerRegisters < 160;

  // Queries come through the ring of keys: sums of segments leave no other room beside its third
  // stage.
  static constexpr bool kQueryRing = kInPlace && kSegments;
  static_assert(!kQueryRing || kConsumers * kGroupRows == kKeys);
  // The next tile's queries are loaded while this tile's are read, where there is room.
  static constexpr int kQueryStages = kConsumers == 1 || (kDim <= (kSegments ? 64 : 128) &&
                                                          !kQueryRegisters && !kWiden && !kInPlace)
                                          ? 2
                                          : 1;

  static constexpr int kDimBlocks = kDim * kBytes / kSwizzledBytes;
  static constexpr int kDimVBlocks = kDimV * kBytes / kSwizzledBytes;
  static constexpr int kKeyBlocks = (kKeys * kBytes + kSwizzledBytes - 1) / kSwizzledBytes;

  // Out goes through shared memory, blocks of 64 columns of which a consumer stages some at once.
  // Pieces of fp8 rows leave no room; results of parts are f32.
  static constexpr bool kStageOut = !kWiden && !kParts;
  // At head dim 256 two instead of one: 0.6 to 0.9 % (4x4k, H200, 2026-11-23).
  static constexpr int kOutBlocks = kDim <= 128                         ? kDimV / kSwizzledColumns
                                    : kDim == 256 && !kRows && !kMasked ? 2
                                                                        : 1;
  static constexpr bool kOwnOut = kStageOut && !kPasses;

  using Slot = Conditional<
      kSegments, CutSlot,
      Conditional<
          kParts, PartSlot,
          Conditional<kPasses, PassSlot,
                      Conditional<kSkips, SkipSlot, Conditional<kFindsKeys, KeysSlot, TileSlot>>>>>;
  // Blocks of 64 columns, swizzled rows of 128 bytes.
  using Queries = uint16_t[kDimBlocks][kGroupRows][kSwizzledColumns];  // of a consumer
  struct QueryStages {
    alignas(1024) Queries q[kQueryStages][kConsumers];
  };
  struct Operands : Conditional<kQueryRing, Nothing, QueryStages> {
    alignas(1024) uint16_t k[kKeyStages][kDimBlocks][kKeys][kSwizzledColumns];
    alignas(1024) uint16_t
        v[kStages][kNarrow ? kKeyBlocks : kDimVBlocks][kNarrow ? kDimV : kKeys][kSwizzledColumns];
  };
  struct OperandsAndRaw : Operands {
    // V as it lies in the cache, to be transposed.
    alignas(1024)
        uint16_t raw_v[kNarrow ? kStages : 1][kDimVBlocks][kNarrow ? kKeys : 1][kSwizzledColumns];
  };
  // Sums of segments and masks leave no room for what they do not use.
  struct SharedMemory : Conditional<kSegments || (kMasked && !kNarrow), Operands, OperandsAndRaw> {
    // Where segments are summed, their sum lies here before out is staged: `sum` below.
    alignas(1024) uint16_t out[kOwnOut ? kConsumers : 1][kOutBlocks * (kSegments ? 2 : 1)]
                              [kOwnOut ? kGroupRows : 1][kSwizzledColumns];
    alignas(kBoxes ? 1024 : 16)
        uint8_t raw[kWiden ? kPieces : 1][kWiden ? kKeys : 1][kWiden ? kRawBytes : 16];
    // One a key, of K and of V.
    alignas(16) float scales[kWiden ? kScaleSlots : 1][2][kWiden ? kKeys : 4];
    float value_units[kWidensApart ? kScaleSlots
                                   : 1];  // what values, times their scales, are relative to
    // What f16 queries are relative to.
    float q_unit[kWiden ? kConsumers : 1][kSegments || (kMasked && !kWiden) ? 1 : kGroupRows];
    // The rows of some key tiles in memory, null: not the request's.
    const char* k_places[kFindsRows ? kPlaceSlots : 1][kFindsRows ? kKeys : 1];
    const char* v_places[kFindsRows ? kPlaceSlots : 1][kFindsRows ? kKeys : 1];
    int begun[kPlaceSlots];  // what each of these key tiles begins
    [[no_unique_address]] Conditional<kFindsRows, WholeTiles<kPlaceSlots>, Nothing> whole;
    Slot tiles[kTileSlots];
    TransactionBarrier q_full[kQueryStages][kConsumers], q_empty[kQueryStages][kConsumers];
    TransactionBarrier k_full[kKeyStages], k_empty[kKeyStages];
    TransactionBarrier v_full[kStages], v_empty[kStages];
    TransactionBarrier raw_full[kPieceBarriers], raw_empty[kPieceBarriers];
    TransactionBarrier places_full[kPlaceSlots], places_empty[kPlaceSlots];
    TransactionBarrier tile_full[kTileSlots], tile_empty[kTileSlots];
    [[no_unique_address]] Conditional<kMasked, MaskMemory<kConsumers, (kKeys + 31) / 32>, Nothing>
        masks;
    [[no_unique_address]] Conditional<kStoresApart, StoreMemory<kConsumers>, Nothing> stores;
    [[no_unique_address]] Conditional<kTokens, TokenMemory<kKeys>, Nothing>
        tokens;  // last: empty ones move what follows
    Conditional<kSegments, SegmentMemory<kConsumers>, Nothing> segments;
    Conditional<kPairs, PairMemory, Nothing> pair;
  };

  // Those of a consumer, in a stage of their own or of the keys.
  __device__ __forceinline__ static Queries& queries(SharedMemory& shared, int stage,
                                                     int consumer) {
    if constexpr (kQueryRing) {
      return reinterpret_cast<Queries*>(&shared.k[stage])[consumer];
    } else {
      return shared.q[stage][consumer];
    }
  }

  // Where a consumer's out is staged.
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
  using Sum = float4[kDimV / 8][kWarpgroupThreads];
  static_assert(!kSegments || sizeof(Sum) <= sizeof(SharedMemory::out[0]));
  __device__ __forceinline__ static Sum& sum(SharedMemory& shared, int consumer) {
    return reinterpret_cast<Sum&>(shared.out[consumer]);
  }

  static constexpr int kBlocksPerSm = 1;
  static constexpr KernelTraits kTraits = {kWarpgroups * kWarpgroupThreads, sizeof(SharedMemory),
                                           kBlocks* kConsumers* kGroupRows, kKeys};
  static_assert(sizeof(SharedMemory) <= kMaxSharedBytes);
  __device__ __forceinline__ static void run(const Params& params);
};

// For a warp that has read ahead and is about to read what the kernel before may have written.
__device__ __forceinline__ void await_inputs(const PrefillParams& params) {
  if (!params.beside) wait_for_previous_kernel();
}

// The request of a slot, with all of its keys.
template <class Config>
__device__ __forceinline__ RequestView slot_view(const TileSlot& slot) {
  const WorkTile& work = slot.work;
  int32_t keys = work.kv_len;
  if constexpr (Config::kParts) keys = static_cast<const PartSlot&>(slot).request_keys;
  return {work.request, work.q_begin, work.q_len, keys};
}

// Of the hidden key tiles the last becomes the one below them all; others stay what they are.
template <class Config>
__device__ __forceinline__ int pass_hidden(const TileSlot& slot, int block) {
  if constexpr (Config::kSkips) {
    const Interval hidden = static_cast<const SkipSlot&>(slot).hidden;
    if (block == hidden.end - 1) return hidden.begin - 1;
  }
  return block;
}

}  // namespace fovea::kernels::cuda
