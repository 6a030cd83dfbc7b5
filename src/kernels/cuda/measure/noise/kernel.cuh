// SPDX-License-Identifier: Apache-2.0
// Fills memory with repeatable, nearly normal values.
#pragma once

#include "kernels/cuda/common/measure_params.h"
#include "kernels/cuda/common/ptx.cuh"

namespace fovea::kernels::cuda {

constexpr int kNoiseThreads = 256;

__device__ inline uint32_t mix(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ x >> 16;
}

// Twelve uniform bytes have mean 1530 and standard deviation 256.
__device__ inline float normal_at(uint64_t index, uint32_t seed) {
  const uint32_t key = mix(static_cast<uint32_t>(index >> 32) ^ seed);
  int sum = -1530;
#pragma unroll
  for (uint32_t draw = 0; draw < 3; ++draw) {
    const uint32_t bits = mix(static_cast<uint32_t>(index) * 3 + draw ^ key);
    sum += (bits & 255) + (bits >> 8 & 255) + (bits >> 16 & 255) + (bits >> 24);
  }
  return static_cast<float>(sum) * (1.0f / 256);
}

template <Type kType>
struct Config {
  using Params = NoiseParams;
  static constexpr int kBlocksPerSm = 4;
  static constexpr KernelTraits kTraits = {kNoiseThreads, 0, 0, 0};

  __device__ static void run(const Params& params) {
    const int64_t step = static_cast<int64_t>(gridDim.x) * kNoiseThreads;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * kNoiseThreads + threadIdx.x;
         i < params.count; i += step) {
      const int64_t at = i / params.row * params.row_stride + i % params.row;
      const float value = params.offset + params.factor * normal_at(i, params.seed);
      if constexpr (kType == f32) {
        static_cast<float*>(params.data)[at] = value;
      } else if constexpr (kType == f8e4m3) {
        // The factor 2^-8 moves the exponent such that an f16 without its low 7 bits is the
        // truncated e4m3.
        const uint32_t half = pack<f16>(fminf(fabsf(value), 448.0f) * 0x1p-8f, 0);
        static_cast<uint8_t*>(params.data)[at] = half >> 7 & 0x7f | (value < 0 ? 0x80 : 0);
      } else {
        static_cast<uint16_t*>(params.data)[at] = pack<kType>(value, 0) & 0xffff;
      }
    }
  }
};

}  // namespace fovea::kernels::cuda
