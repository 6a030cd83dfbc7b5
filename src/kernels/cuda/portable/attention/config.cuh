// SPDX-License-Identifier: Apache-2.0
// Tiles and shared memory of the portable attention kernel.
#pragma once

#include "kernels/cuda/common/types.cuh"
#include "kernels/cuda/common/visibility.cuh"

namespace fovea::kernels::cuda {

// Rows in shared memory are padded by one 16-byte chunk: eight rows then start in eight different
// bank groups for every head dim that is a multiple of 16.
constexpr int kPad = 8;

// Shared memory of a block. Two blocks fit an SM of Hopper. sm_86, sm_89 and sm_120 have 99 KB; on
// sm_100 the compiler spills registers with the larger tiles that more would allow.
constexpr int kMinSharedLimit = 99 << 10;
#if __CUDA_ARCH__ == 900
constexpr int kSharedLimit = 113 << 10;
#else
constexpr int kSharedLimit = kMinSharedLimit;
#endif

// The work of one CTA: the item, and the place of its rows.
struct Tile {
  int index;  // number of the item in the list
  WorkItem item;
  RequestView view;
  int group;  // q heads a kv head
  int rows;   // valid rows, at most the row tile

  __device__ int token_of(int row) const { return (item.first_row + row) / group; }
  __device__ int head_of(int row) const {
    return item.kv_head * group + (item.first_row + row) % group;
  }
};

// The addresses of a key's rows, and the index of its scales. Keys outside the item have some valid
// address of the cache.
struct KeyRow {
  const char* k;
  const char* v;
  int64_t scale;
};

// A query row. A row that does not exist has no keys, and the address of the first query.
struct QueryRow {
  const char* q;
  int token, head;
  int position;
  int first_key, end_key;  // without a predicate, exactly the visible keys
  float slope;             // ALiBi's, in units of log2
};

// For fp8 queries, the factor of each row from products to scores.
template <bool kFp8Queries, int kRows>
struct QueryScales {
  float query_scale[kRows];
};
template <int kRows>
struct QueryScales<false, kRows> {};

// The keys that some row of a warp sees, and the keys that every row sees.
struct alignas(16) WarpKeys {
  Interval some, all;  // `all` is empty where masks need a predicate
};

// A block has kRows query rows. With 16 rows its warps share them and split the keys of a tile;
// with 64 or 128 each of four warps has 16 or 32 rows of its own.
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
  // The type of the products. fp8 becomes f16, which is exact and from sm_89 on one instruction for
  // two values; weights and queries are then f16 too.
  static constexpr Type kMath = kConvert ? f16 : kQuery;
  // Weights are multiplied by scales per token in this unit: scale * unit is about the row's
  // largest value, while the scale alone would make f16 weights subnormal.
  static constexpr float kScaleUnit = kCache == f8e4m3 ? 256.0f : 32768.0f;
  // Scores may exceed the base of their exponents by this much, in log2: weights reach 16 before
  // sums are rescaled. With scales of large values in them, f16 weights might overflow.
  static constexpr float kMaximumLag = kConvert ? 0 : 4;

  static constexpr int kRowTile = kRows;
  static constexpr bool kSplitsKeys = kRows == 16;
  // The m16 tiles of a warp. With two, a fragment of K or V from shared memory serves two products.
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
      // The sums of warps that split keys, written after the item's last tile has been read.
      struct {
        float part_out[kParts][kDimV / 2][32];
        float part_base[kParts][16];
        float part_sum[kParts][16];
      };
    };
    // fp8 rows as in the cache, which are converted tile by tile.
    alignas(16) uint8_t raw_k[kConvert ? kStages : 1][kConvert ? kKeys : 1][kConvert ? kDim : 16];
    alignas(16) uint8_t raw_v[kConvert ? kStages : 1][kConvert ? kKeys : 1][kConvert ? kDimV : 16];
    float k_scale[kConvert ? kStages : 1][kKeys];
    float v_scale[kConvert ? kStages : 1][kKeys];
    KeyRow rows[2][kKeys];
    QueryRow queries[kRows];
    // In registers these would leave too few for the sums.
    Tile tile;
    WarpKeys warp_keys[4];
  };
  template <int kKeys, int kStages>
  static constexpr bool fits() {
    // With fp8 queries the compiler spills on sm_90 too if tiles are larger.
    return sizeof(Memory<kKeys, kStages>) <= (kQuery == f8e4m3 ? kMinSharedLimit : kSharedLimit);
  }

  static constexpr int kKeys = fits<64, 2>() ? 64 : fits<32, 2>() ? 32 : 16;
  static constexpr int kStages = kSplitsKeys && fits<kKeys, 3>() ? 3 : 2;
  using SharedMemory = Memory<kKeys, kStages>;
  static constexpr int kWarps = kSplitsKeys ? kKeys / 16 : 4;
  static constexpr int kThreads = kWarps * 32;
  // Keys of one step of a warp through a tile; the scores of more keys would not fit the registers.
  static constexpr int kWarpKeys = kSplitsKeys ? 16 : kRowFragments == 2 && kKeys > 32 ? 32 : kKeys;
  static_assert(kKeys <= kThreads && fits<kKeys, kStages>());

  static constexpr int kBlocksPerSm = 1;
  static constexpr KernelTraits kTraits = {kThreads, sizeof(SharedMemory), kRows, kKeys};
  __device__ static void run(const Params& params);
};

}  // namespace fovea::kernels::cuda
