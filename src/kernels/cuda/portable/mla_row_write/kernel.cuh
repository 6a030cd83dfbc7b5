// SPDX-License-Identifier: Apache-2.0
// Stores new tokens as rows of KvLayout::mla_fp8_rows: 512 e4m3 latent values, their four scales,
// 64 bf16 values of the rotary key. One warp a token, 16 values a lane; eight lanes share a scale.
// With rotary positions it rotates the key, and further warps rotate the rotary part of q in place.
#pragma once

#include "kernels/cuda/common/fp8_codes.cuh"
#include "kernels/cuda/common/overlap.cuh"
#include "kernels/cuda/common/rotated_rows.cuh"
#include "kernels/mla_row.h"

namespace fovea::kernels::cuda {

constexpr int kLaneValues = kMlaRowLatent / 32;
constexpr int kScaleLanes = kMlaRowScaleGroup / kLaneValues;
static_assert(kLaneValues == 16 && kScaleLanes == 8);

template <Type kNew>
struct MlaRowWriteConfig {
  // k: latents, v: rotary keys, neither normed; strides of k_cache count bytes.
  using Params = HeadWriteParams;
  static constexpr int kBlocksPerSm = 1;
  static constexpr KernelTraits kTraits = {kWriteWarps * 32, 0, 0, 0};

  struct alignas(16) Values {
    uint16_t of[kLaneValues];
  };

  // Returns the scale of the values of eight lanes, without infinities and NaN.
  __device__ static float group_scale(const Values& values) {
    float largest = 0;
    for (const uint16_t value : values.of) {
      const float magnitude = fabsf(to_float<kNew>(value));
      if (magnitude < infinity()) largest = fmaxf(largest, magnitude);
    }
    for (int step = 1; step < kScaleLanes; step *= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
    }
    const float exact = largest / largest_fp8<f8e4m3>();
    return exact >= 0x1p-126f ? exact : 1.0f;
  }

  // Returns eight values of the rotary key of token `token`.
  __device__ static Chunk rope_chunk(const KvWriteParams& params, int64_t token, int index,
                                     bool finite) {
    const auto* const row = static_cast<const uint16_t*>(params.v) + token * params.v_token_stride;
    Chunk chunk = params.rotary.cos
                      ? rotated_chunk<kNew>(params.rotary, {}, row, index, params.positions[token])
                      : reinterpret_cast<const Chunk*>(row)[index];
    for (uint16_t& value : chunk.values) {
      if constexpr (kNew != bf16) {
        value = static_cast<uint16_t>(pack<bf16>(to_float<kNew>(value), 0.0f));
      }
      if (finite) value = made_finite<bf16>(value);
    }
    return chunk;
  }

  // Launched as portable/kv_write.
  __device__ static void run(const Params& given) {
    wait_and_allow_next();
    const KvWriteParams& params = given.rows;
    const int64_t warp = static_cast<int64_t>(blockIdx.x) * kWriteWarps + threadIdx.x / 32;
    const int heads = 1 + params.q_heads;
    const int64_t token = warp / heads;
    if (token >= given.tokens) return;
    if (const int head = static_cast<int>(warp % heads); head > 0) {
      return rotate_query<kNew>(given, kMlaRowRope, token, head - 1);
    }
    if (token >= params.q_indptr[params.requests]) return;
    if (params.k == nullptr) return;
    const int64_t slot = params.slots[token];
    if (slot < 0 || slot >= params.slot_count) return;
    const bool finite = slot < params.page_size;  // page 0
    char* const row = static_cast<char*>(params.k_cache) +
                      slot / params.page_size * params.k_page_stride +
                      slot % params.page_size * params.k_place_stride;
    const int lane = threadIdx.x % 32;
    const auto* const latent =
        static_cast<const uint16_t*>(params.k) + token * params.k_token_stride;
    const Values values = reinterpret_cast<const Values*>(latent)[lane];
    const float scale = group_scale(values);
    uint32_t codes[kLaneValues / 4] = {};
    for (int i = 0; i < kLaneValues; ++i) {
      const uint16_t value = finite ? made_finite<kNew>(values.of[i]) : values.of[i];
      const uint32_t code = to_fp8<f8e4m3>(to_float<kNew>(value) / scale);
      codes[i / 4] |= code << (i % 4 * 8);
    }
    reinterpret_cast<uint4*>(row)[lane] = {codes[0], codes[1], codes[2], codes[3]};
    if (lane % kScaleLanes == 0) {
      reinterpret_cast<float*>(row + kMlaRowScaleOffset)[lane / kScaleLanes] = scale;
    }
    if (lane < kMlaRowRope / kChunk) {
      reinterpret_cast<Chunk*>(row + kMlaRowRopeOffset)[lane] =
          rope_chunk(params, token, lane, finite);
    }
  }
};

template <Type kNew>
using Config = MlaRowWriteConfig<kNew>;

}  // namespace fovea::kernels::cuda
