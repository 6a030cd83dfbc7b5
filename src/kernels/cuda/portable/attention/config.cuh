// SPDX-License-Identifier: Apache-2.0
// Tiles and shared memory of the portable attention kernel.
#pragma once

#include "kernels/cuda/common/attention_params.h"
#include "kernels/cuda/common/types.cuh"

namespace fovea::kernels::cuda {

constexpr int kWarps = 4;
constexpr int kRowTile = 16 * kWarps;  // one m16 tile per warp
// Rows in shared memory are padded by one 16-byte chunk: eight rows then start in eight different
// bank groups for every head dim that is a multiple of 16.
constexpr int kPad = 8;

// What a block may have at least: of the GPUs that run sm_80 code, sm_86 and sm_89 have 99 KB, as sm_120.
#if __CUDA_ARCH__ == 900 || __CUDA_ARCH__ == 1000
constexpr int kSharedLimit = 227 << 10;
#else
constexpr int kSharedLimit = 99 << 10;
#endif

template <int kDim, int kDimV, Type kQuery, Type kCache>
struct AttentionConfig {
  static_assert(kDim % 16 == 0 && kDimV % 16 == 0);
  using Params = AttentionParams;
  static constexpr int kHeadDim = kDim;
  static constexpr int kHeadDimV = kDimV;
  static constexpr Type kQ = kQuery;
  static constexpr Type kKv = kCache;
  static constexpr bool kConvert = type_bytes(kCache) == 1;
  // Scales per token are folded into the weights, in units of this: scale * unit is about the row's
  // largest value, where the scale itself would make f16 weights subnormal.
  static constexpr float kScaleUnit = kCache == f8e4m3 ? 256.0f : 32768.0f;
  // Two stages of K and V; with head dim 256 tiles of 32 keys take 103 KB.
  static constexpr int kKeys = kDim + kDimV <= 256                             ? 64
                               : kDim + kDimV <= 384 || kSharedLimit > 99 << 10 ? 32
                                                                               : 16;
  static constexpr int kStages = 2;

  using Element = uint16_t;
  struct SharedMemory {
    alignas(16) Element q[kRowTile][kDim + kPad];
    alignas(16) Element k[kConvert ? 1 : kStages][kKeys][kDim + kPad];
    alignas(16) Element v[kConvert ? 1 : kStages][kKeys][kDimV + kPad];
    // fp8 rows as they lie in the cache, converted tile by tile.
    alignas(16) uint8_t raw_k[kConvert ? kStages : 1][kConvert ? kKeys : 1][kConvert ? kDim : 16];
    alignas(16) uint8_t raw_v[kConvert ? kStages : 1][kConvert ? kKeys : 1][kConvert ? kDimV : 16];
    int64_t k_row[kStages][kKeys];  // element offsets of the tile's rows
    int64_t v_row[kStages][kKeys];
    float k_scale[kStages][kKeys];
    float v_scale[kStages][kKeys];
  };

  static_assert(sizeof(SharedMemory) <= kSharedLimit);
  static constexpr int kBlocksPerSm = 1;
  static constexpr KernelTraits kTraits = {kWarps * 32, sizeof(SharedMemory), kRowTile, kKeys};
  __device__ static void run(const Params& params);
};

}  // namespace fovea::kernels::cuda
