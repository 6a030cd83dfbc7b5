// SPDX-License-Identifier: Apache-2.0
// Stores new keys and values. A warp takes one (token, head) row of K and then of V; per-token-head
// scales need the largest magnitude of the row first. With rotary positions the kernel rotates k on
// the way, and further warps rotate q in place, which saves two launches a layer. Norms of the
// heads of q and k come before their rotation.
#pragma once

#include "kernels/cuda/common/fp8_codes.cuh"
#include "kernels/cuda/common/overlap.cuh"
#include "kernels/cuda/common/rotated_rows.cuh"

namespace fovea::kernels::cuda {

template <Type kNew, Type kCache>
struct KvWriteConfig {
  using Params = HeadWriteParams;
  static constexpr int kBlocksPerSm = 3;  // more registers would let fewer run at once
  static constexpr KernelTraits kTraits = {kWriteWarps * 32, 0, 0, 0};

  struct Side {
    const uint16_t* from;  // the new row
    int64_t to;            // element offset in the cache
    void* cache;
    float* scale;  // base of the scales, or null
    int dim;
    bool finite;   // the row is in page 0, which must stay finite
    bool rotates;  // by `position`, after `norm`
    int position;
    RowNorm norm;

    __device__ Chunk chunk(const KvWriteParams& params, int index) const {
      Chunk chunk = rotates ? rotated_chunk<kNew>(params.rotary, norm, from, index, position)
                            : reinterpret_cast<const Chunk*>(from)[index];
      if (finite) {
        for (uint16_t& value : chunk.values) value = made_finite<kNew>(value);
      }
      return chunk;
    }
  };

  // Returns the largest finite magnitude of a row.
  __device__ static float largest(const KvWriteParams& params, const Side& side) {
    float most = 0;
    for (int index = threadIdx.x % 32; index < side.dim / kChunk; index += 32) {
      const Chunk chunk = side.chunk(params, index);
      for (const uint16_t value : chunk.values) {
        const float magnitude = fabsf(to_float<kNew>(value));
        if (magnitude < infinity()) most = fmaxf(most, magnitude);
      }
    }
    for (int step = 16; step > 0; step /= 2) {
      most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
    }
    return most;
  }

  // Returns the scale of a row; computes and stores it if scales are per_token_head. `other` is the
  // other side, which may share the scales.
  __device__ static float row_scale(const KvWriteParams& params, const Side& side,
                                    const Side& other, int64_t slot, int head) {
    switch (params.scale_kind) {
      case kScalePerTensor:
        return side.scale[0];
      case kScalePerHead:
        return side.scale[head];
      case kScalePerTokenHead: {
        float most = largest(params, side);
        if (side.scale == other.scale) most = fmaxf(most, largest(params, other));
        const float exact = most / largest_fp8<kCache>();
        const float scale = exact >= 0x1p-126f ? exact : 1.0f;
        if (threadIdx.x % 32 == 0) side.scale[slot * params.kv_heads + head] = scale;
        return scale;
      }
      default:
        return 1.0f;
    }
  }

  __device__ static void write_row(const KvWriteParams& params, const Side& side, const Side& other,
                                   int64_t slot, int head) {
    float scale = 1;
    if constexpr (kCache != kNew) scale = row_scale(params, side, other, slot, head);
    for (int index = threadIdx.x % 32; index < side.dim / kChunk; index += 32) {
      const Chunk chunk = side.chunk(params, index);
      if constexpr (kCache == kNew) {
        auto* cache = static_cast<uint16_t*>(side.cache) + side.to;
        reinterpret_cast<Chunk*>(cache)[index] = chunk;
      } else {
        uint32_t codes[2] = {0, 0};
        for (int i = 0; i < kChunk; ++i) {
          const uint32_t code = to_fp8<kCache>(to_float<kNew>(chunk.values[i]) / scale);
          codes[i / 4] |= code << (i % 4 * 8);
        }
        auto* cache = static_cast<uint8_t*>(side.cache) + side.to;
        reinterpret_cast<uint2*>(cache)[index] = {codes[0], codes[1]};
      }
    }
  }

  // Overlaps with the preceding kernel on sm_90 and later. The attention that follows waits for
  // this kernel before it reads new keys.
  __device__ static void run(const Params& given) {
    wait_and_allow_next();
    const KvWriteParams& params = given.rows;
    const int64_t warp = static_cast<int64_t>(blockIdx.x) * kWriteWarps + threadIdx.x / 32;
    const int heads = params.kv_heads + params.q_heads;
    const int64_t token = warp / heads;
    const int head = static_cast<int>(warp % heads);
    if (token >= given.tokens) return;
    if (head >= params.kv_heads)
      return rotate_query<kNew>(given, params.head_dim, token, head - params.kv_heads);
    if (params.k == nullptr) return;
    int64_t slot = params.slots[token];
    const auto* const new_k = static_cast<const uint16_t*>(params.k) +
                              token * params.k_token_stride + head * params.k_head_stride;
    const auto* const new_v = static_cast<const uint16_t*>(params.v) +
                              token * params.v_token_stride + head * params.v_head_stride;
    RowStart::read_early(new_v, params.head_dim_v);
    const RowStart start = RowStart::load<kNew>(given, given.k_norm, new_k, params.head_dim, token);
    if (token >= start.tokens || slot < 0 || slot >= params.slot_count) return;
    if (params.slot_map) slot = params.slot_map[slot];
    if (slot < 0) return;
    const int64_t page = slot / params.page_size;
    const int64_t place = slot % params.page_size;
    const Side k = {new_k,
                    page * params.k_page_stride + place * params.k_place_stride +
                        head * params.k_cache_head_stride,
                    params.k_cache,
                    params.k_scale,
                    params.head_dim,
                    page == 0,
                    params.rotary.cos != nullptr,
                    start.position,
                    start.norm};
    const Side v = {new_v,
                    page * params.v_page_stride + place * params.v_place_stride +
                        head * params.v_cache_head_stride,
                    params.v_cache,
                    params.v_scale,
                    params.head_dim_v,
                    page == 0,
                    false,
                    0,
                    {}};
    write_row(params, k, v, slot, head);
    write_row(params, v, k, slot, head);
  }
};

template <Type kNew, Type kCache>
using Config = KvWriteConfig<kNew, kCache>;

}  // namespace fovea::kernels::cuda
