// SPDX-License-Identifier: Apache-2.0
// Tiles and shared memory of the portable attention kernel.
#pragma once

#include "kernels/cuda/common/types.cuh"
#include "kernels/cuda/common/visibility.cuh"

namespace fovea::kernels::cuda {

// Rows in shared memory are padded by one 16-byte chunk: eight rows then start in eight different
// bank groups for every head dim that is a multiple of 16.
constexpr int kPad = 8;

// Shared memory of a block: two blocks fit an SM of Hopper. Of the GPUs that run sm_80 code, sm_86
// and sm_89 have 99 KB, as sm_120; sm_100's compiler spills with the larger tiles of more.
constexpr int kLeastSharedLimit = 99 << 10;
#if __CUDA_ARCH__ == 900
constexpr int kSharedLimit = 113 << 10;
#else
constexpr int kSharedLimit = kLeastSharedLimit;
#endif

// What one CTA works on: the item, and where its rows are.
struct Tile {
  int index;  // of the item in the list
  WorkItem item;
  RequestView view;
  int group;  // q heads of the kv head
  int rows;   // valid ones, at most the row tile

  __device__ int token_of(int row) const { return (item.first_row + row) / group; }
  __device__ int head_of(int row) const {
    return item.kv_head * group + (item.first_row + row) % group;
  }
};

// Where a key lies, and its scales' place. For keys outside the item: some address of the cache.
struct KeyRow {
  const char* k;
  const char* v;
  int64_t scale;
};

// A query row. One that does not exist has no keys and, as its address, that of all queries.
struct QueryRow {
  const char* q;
  int token, head;
  int position;
  int first_key, end_key;  // without a predicate: exactly the visible ones
  float slope;             // ALiBi, in units of log2
};

// Of fp8 queries, a row each: what makes its products scores.
template <bool kFp8Queries, int kRows>
struct QueryScales {
  float query_scale[kRows];
};
template <int kRows>
struct QueryScales<false, kRows> {};

// The keys that a warp's rows see, and those that all of them see, without a mask.
struct alignas(16) WarpKeys {
  Interval some, all;  // `all` is empty where masks need a predicate
};

// kRows query rows a block: with 16 its warps share them and split the keys of a tile, with 64 or
// 128 each of four warps has 16 or 32 of its own.
template <int kDim, int kDimV, Type kQuery, Type kCache, int kRows>
struct AttentionConfig {
  static_assert(kDim % 16 == 0 && kDimV % 16 == 0);
  static_assert(kRows == 16 || kRows == 64 || kRows == 128);
  using Params = AttentionParams;
  static constexpr int kHeadDim = kDim;
  static constexpr int kHeadDimV = kDimV;
  static constexpr Type kQ = kQuery;
  static constexpr Type kKv = kCache;
  static constexpr Type kOut = type_bytes(kQuery) == 1 ? bf16 : kQuery;
  static constexpr bool kConvert = type_bytes(kCache) == 1;
  static_assert(type_bytes(kQuery) == 2 || kConvert, "fp8 queries become f16 as fp8 caches do");
  // What is multiplied: fp8 as f16, which is one instruction for two values from sm_89 on and
  // exact, so weights are f16 then and so are queries.
  static constexpr Type kMath = kConvert ? f16 : kQuery;
  // Scales per token are folded into the weights, in units of this: scale * unit is about the row's
  // largest value, where the scale itself would make f16 weights subnormal.
  static constexpr float kScaleUnit = kCache == f8e4m3 ? 256.0f : 32768.0f;
  // How far scores may exceed the base of their exponents, in log2: weights reach 16 before sums
  // are rescaled. Those with scales of large values folded in might overflow f16.
  static constexpr float kMaximumLag = kConvert ? 0 : 4;

  static constexpr int kRowTile = kRows;
  static constexpr bool kSplitsKeys = kRows == 16;
  // A warp's m16 tiles: with two, a fragment of K or V out of shared memory serves two products.
  static constexpr int kRowFragments = kRows == 128 ? 2 : 1;

  template <int kKeys, int kStages>
  struct Memory : QueryScales<kQuery == f8e4m3, kRows> {
    static constexpr int kParts = kSplitsKeys ? kKeys / 16 : 1;
    alignas(16) uint16_t q[kRows][kDim + kPad];
    union {
      struct {
        alignas(16) uint16_t k[kConvert ? 1 : kStages][kKeys][kDim + kPad];
        alignas(16) uint16_t v[kConvert ? 1 : kStages][kKeys][kDimV + kPad];
      };
      // Sums of warps that split keys, once the item's last tile is read.
      struct {
        float part_out[kParts][kDimV / 2][32];
        float part_base[kParts][16];
        float part_sum[kParts][16];
      };
    };
    // fp8 rows as they lie in the cache, converted tile by tile.
    alignas(16) uint8_t raw_k[kConvert ? kStages : 1][kConvert ? kKeys : 1][kConvert ? kDim : 16];
    alignas(16) uint8_t raw_v[kConvert ? kStages : 1][kConvert ? kKeys : 1][kConvert ? kDimV : 16];
    float k_scale[kConvert ? kStages : 1][kKeys];
    float v_scale[kConvert ? kStages : 1][kKeys];
    KeyRow rows[2][kKeys];
    QueryRow queries[kRows];
    // These would take registers from the sums.
    Tile tile;
    WarpKeys warp_keys[4];
  };
  template <int kKeys, int kStages>
  static constexpr bool fits() {
    // Under fp8 queries sm_90's compiler spills with the larger tiles too.
    return sizeof(Memory<kKeys, kStages>) <= (kQuery == f8e4m3 ? kLeastSharedLimit : kSharedLimit);
  }

  static constexpr int kKeys = fits<64, 2>() ? 64 : fits<32, 2>() ? 32 : 16;
  static constexpr int kStages = kSplitsKeys && fits<kKeys, 3>() ? 3 : 2;
  using SharedMemory = Memory<kKeys, kStages>;
  static constexpr int kWarps = kSplitsKeys ? kKeys / 16 : 4;
  static constexpr int kThreads = kWarps * 32;
  // Keys of a warp's step through a tile: scores of more would not fit the registers.
  static constexpr int kWarpKeys = kSplitsKeys ? 16 : kRowFragments == 2 && kKeys > 32 ? 32 : kKeys;
  static_assert(kKeys <= kThreads && fits<kKeys, kStages>());

  static constexpr int kBlocksPerSm = 1;
  static constexpr KernelTraits kTraits = {kThreads, sizeof(SharedMemory), kRows, kKeys};
  __device__ static void run(const Params& params);
};

}  // namespace fovea::kernels::cuda
