// SPDX-License-Identifier: Apache-2.0
// Requirements of fp8 on consumers: bf16 queries of fp8 caches as f16, scales, and weights of fp8
// products.
#pragma once

#include "kernels/cuda/sm90/common/row_tile.cuh"

namespace fovea::kernels::cuda {

// Returns 2^e <= x < 2^(e + 1), the smallest power for 0, and 1 if there is none.
__device__ __forceinline__ float power_of_two_below(float x) {
  const float power = __int_as_float(__float_as_int(x) & 0x7f800000);
  return power < infinity() ? fmaxf(power, 0x1p-126f) : 1.0f;
}

__device__ __forceinline__ float2 unpack_bf16(uint32_t two) {
  return {__int_as_float(two << 16), __int_as_float(two & 0xffff0000)};
}

// Converts the warp's 16 bf16 query rows to f16, in place, relative to their q_unit.
template <class Config>
__device__ __forceinline__ void narrow_queries(typename Config::SharedMemory& shared, int consumer,
                                               int stage) {
  const int lane = threadIdx.x % 32;
  const int row = threadIdx.x % kWarpgroupThreads / 32 * 16 + lane / 2;
  const auto at = [&](int chunk) {
    return reinterpret_cast<uint4*>(
        &shared.q[stage][consumer][chunk / 8][row][(chunk % 8 ^ row % 8) * 8]);
  };
  float most = 0;
#pragma unroll 4
  for (int chunk = lane % 2; chunk < Config::kHeadDim / 8; chunk += 2) {
    const uint4 words = *at(chunk);
    for (const uint32_t two : {words.x, words.y, words.z, words.w}) {
      const float2 values = unpack_bf16(two);
      most = fmaxf(most, fmaxf(fabsf(values.x), fabsf(values.y)));
    }
  }
  most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
  const float unit = power_of_two_below(most);
  const float factor = 1 / unit;
  const auto narrow = [&](uint32_t two) {
    const float2 values = unpack_bf16(two);
    return pack<f16>(values.x * factor, values.y * factor);
  };
#pragma unroll 4
  for (int chunk = lane % 2; chunk < Config::kHeadDim / 8; chunk += 2) {
    const uint4 words = *at(chunk);
    *at(chunk) = {narrow(words.x), narrow(words.y), narrow(words.z), narrow(words.w)};
  }
  if (lane % 2 == 0) shared.q_unit[consumer][row] = unit;
  fence_async_proxy();
  meet_consumer(consumer);
}

// Returns the scale that all keys of a head share, or 1.
__device__ __forceinline__ float shared_scale(const KeyParams& keys, const float* scale,
                                              int kv_head) {
  return scale && keys.scale_slot_stride == 0 ? scale[kv_head * keys.scale_head_stride] : 1.0f;
}

// Returns the unit of sums of values.
template <class Config>
__device__ __forceinline__ float value_unit(const AttentionParams& attention, const WorkTile& work,
                                            const Accumulators<Config>& acc) {
  const KeyParams& keys = attention.keys;
  if constexpr (!Config::kFp8) return 1;
  if constexpr (Config::kWiden) {
    return keys.scale_slot_stride ? acc.fp8.v_unit : shared_scale(keys, keys.v_scale, work.kv_head);
  } else {
    return shared_scale(keys, keys.v_scale, work.kv_head);
  }
}

__device__ __forceinline__ bool keys_have_scales(const PrefillParams& params) {
  return params.attention.keys.scale_slot_stride != 0;
}

// Loads the scales of two neighbouring keys.
__device__ __forceinline__ float2 load_scales(const float* scales) {
  return load_here(*reinterpret_cast<const float2*>(scales));
}

__device__ __forceinline__ float query_scale(const PrefillParams& params, int64_t token, int head) {
  const AttentionParams& attention = params.attention;
  return attention.q_scale ? attention.q_scale[token * attention.q_scale_token_stride +
                                               head * attention.q_scale_head_stride]
                           : 1.0f;
}

// Packs weights as a left operand. A thread's scores of 16 keys belong to keys 2t, 2t + 1, 2t + 8
// and 2t + 9, where t is its place among four; a register of the operand holds those of 4t to 4t +
// 3. So keys change places, and transpose_values() puts those of V in the same order.
template <int kKeys>
__device__ __forceinline__ void pack_e4m3_weights(const float (&scores)[kKeys / 2],
                                                  uint32_t (&weights)[kKeys / 8]) {
#pragma unroll
  for (int i = 0; i < kKeys / 16; ++i) {
    const float* s = &scores[8 * i];
    weights[2 * i] = pack_e4m3(s[0], s[1], s[4], s[5]);
    weights[2 * i + 1] = pack_e4m3(s[2], s[3], s[6], s[7]);
  }
}

// Multiplies raw scores by the scales of their keys.
template <class Config>
__device__ __forceinline__ void scale_keys(const float* scales,
                                           float (&scores)[Config::kKeys / 2]) {
#pragma unroll
  for (int j = 0; j < Config::kKeys / 8; ++j) {
    const float2 scale = load_scales(&scales[8 * j + threadIdx.x % 4 * 2]);
    scores[4 * j] *= scale.x;
    scores[4 * j + 1] *= scale.y;
    scores[4 * j + 2] *= scale.x;
    scores[4 * j + 3] *= scale.y;
  }
}

// Returns the unit of scales of values, a power of two that keeps weights in the range of f16: near
// the largest scale of the key tile, if that exceeds `before`.
template <class Config>
__device__ __forceinline__ float values_unit(const float* scales, float before) {
  float most = 0;
  for (int i = threadIdx.x % 32; i < Config::kKeys; i += 32) most = fmaxf(most, scales[i]);
  for (int step = 1; step < 32; step *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
  return before == 0 || most >= 2 * before ? power_of_two_below(most) : before;
}

// Returns the unit of the key tile whose scales of values are in `slot`.
template <class Config>
__device__ __forceinline__ float tile_unit(const typename Config::SharedMemory& shared, int slot,
                                           float before) {
  if constexpr (Config::kWidensApart) return shared.value_units[slot];
  return values_unit<Config>(shared.scales[slot][1], before);
}

// Multiplies packed weights by the scales of their values.
template <class Config>
__device__ __forceinline__ void scale_packed(const float* scales, float unit,
                                             uint32_t (&weights)[Config::kKeys / 4]) {
  const float factor = 1 / unit;
#pragma unroll
  for (int j = 0; j < Config::kKeys / 8; ++j) {
    const float2 scale = load_scales(&scales[8 * j + threadIdx.x % 4 * 2]);
    const uint32_t two = pack<f16>(scale.x * factor, scale.y * factor);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      weights[2 * j + half] = multiply_f16(weights[2 * j + half], two);
    }
  }
}

// Finds the factors of the thread's rows, after narrow_queries().
template <class Config>
__device__ __forceinline__ void scale_rows(const PrefillParams& params,
                                           const typename Config::SharedMemory& shared,
                                           int consumer, RowTile& tile) {
  if constexpr (!Config::kFp8) return;
  const KeyParams& keys = params.attention.keys;
  const WorkTile& work = tile.slot->work;
  const bool transformed = Config::kTransforms && modifies_scores(params.attention);
  const ScoreUnits units = score_units<Config>(params, params.attention.scale);
  const float scale =
      (transformed ? units.inner : units.factor) * shared_scale(keys, keys.k_scale, work.kv_head);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = thread_row(half);
    float factor = scale;
    if constexpr (Config::kMath != Config::kQ) factor *= shared.q_unit[consumer][row];
    if constexpr (Config::kNarrow) {
      const int token = min(row_token(params, work, consumer, row), work.q_len - 1);
      factor *= query_scale(params, work.q_begin + token, row_head(params, work, row));
    }
    if (transformed) {
      tile.inner[half] = factor;
    } else {
      tile.factor[half] = factor;
    }
  }
}

}  // namespace fovea::kernels::cuda
