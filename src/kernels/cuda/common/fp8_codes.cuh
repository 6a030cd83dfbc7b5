// SPDX-License-Identifier: Apache-2.0
// Conversions from 16-bit values to fp8 codes, for caches.
#pragma once

#include "kernels/cuda/common/ptx.cuh"

namespace fovea::kernels::cuda {

template <Type kType>
constexpr float largest_fp8() {
  return kType == f8e4m3 ? 448.0f : 57344.0f;
}

// Rounds to nearest even and saturates. It computes in integers because sm_80 has no instruction
// for this: it rounds the value at the lowest mantissa bit that is kept, which is fixed for
// subnormals.
template <Type kType>
__device__ inline uint8_t to_fp8(float value) {
  constexpr int kMantissa = kType == f8e4m3 ? 3 : 2;
  constexpr int kBias = kType == f8e4m3 ? 7 : 15;
  const uint32_t bits = __float_as_uint(value);
  const uint8_t sign = bits >> 24 & 0x80;
  const float magnitude = fabsf(value);
  if (!(magnitude == magnitude)) return sign | 0x7f;
  if (magnitude >= largest_fp8<kType>()) {
    return sign | (kType == f8e4m3 ? 0x7e : 0x7b);
  }
  constexpr float kSmallestNormal = kType == f8e4m3 ? 0x1p-6f : 0x1p-14f;
  if (magnitude < kSmallestNormal) {
    // Units of the subnormals; rintf rounds to even, and the carry into the normals is right.
    constexpr float kUnits = kType == f8e4m3 ? 0x1p9f : 0x1p16f;
    return sign | static_cast<uint8_t>(rintf(magnitude * kUnits));
  }
  constexpr int kDropped = 23 - kMantissa;
  const uint32_t even = bits >> kDropped & 1;
  const uint32_t rounded = (bits & 0x7fffffff) + (1u << (kDropped - 1)) - 1 + even;
  return sign | static_cast<uint8_t>((rounded >> kDropped) - ((127 - kBias) << kMantissa));
}

// Turns NaN into 0 and an infinity into the largest finite value, so that page 0 stays finite.
template <Type kType>
__device__ inline uint16_t made_finite(uint16_t bits) {
  constexpr uint16_t kInfinity = kType == bf16 ? 0x7f80 : 0x7c00;
  const uint16_t magnitude = bits & 0x7fff;
  if (magnitude < kInfinity) return bits;
  return magnitude > kInfinity ? 0 : (bits & 0x8000) | (kInfinity - 1);
}

}  // namespace fovea::kernels::cuda
