// SPDX-License-Identifier: Apache-2.0
// Scalar conversions between f32 and the storage types, which round to nearest even. The SIMD
// kernels have their own conversions; tests compare the two.
#pragma once

#include <bit>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "fovea/dtype.h"

namespace fovea {

inline float bf16_to_float(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

inline uint16_t float_to_bf16(float value) {
  uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u)
    return static_cast<uint16_t>((bits >> 16) | 0x40u);  // NaN
  bits += 0x7fffu + ((bits >> 16) & 1u);
  return static_cast<uint16_t>(bits >> 16);
}

inline float f16_to_float(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  const uint32_t exponent = (bits >> 10) & 0x1fu;
  const uint32_t mantissa = bits & 0x3ffu;
  if (exponent == 0x1fu) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
  if (exponent == 0) {
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return sign ? -magnitude : magnitude;
  }
  return std::bit_cast<float>(sign | ((exponent + 112u) << 23) | (mantissa << 13));
}

inline uint16_t float_to_f16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);   // NaN
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // rounds to infinity
  if (magnitude < 0x38800000u) {
    // Subnormal: scale so that one unit is 2^-24, and let nearbyint round to even.
    const float scaled = std::bit_cast<float>(magnitude) * 0x1p24f;
    return static_cast<uint16_t>(sign | static_cast<uint32_t>(std::nearbyint(scaled)));
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

namespace detail {

// Converts to the fp8 format with `mantissa_bits`, exponent bias `bias` and largest finite
// magnitude `max_code`.
inline uint8_t float_to_fp8(float value, int mantissa_bits, int bias, uint8_t max_code,
                            uint8_t nan_code, float max_value) {
  const uint8_t sign = std::signbit(value) ? 0x80 : 0;
  if (std::isnan(value)) return static_cast<uint8_t>(sign | nan_code);
  const float magnitude = std::fabs(value);
  if (magnitude == 0) return sign;
  if (magnitude >= max_value) return static_cast<uint8_t>(sign | max_code);
  int exponent = 0;
  std::frexp(magnitude, &exponent);               // magnitude = f * 2^exponent, f in [0.5, 1)
  int unit = exponent - 1 - mantissa_bits;        // exponent of one ulp
  const int smallest = 1 - bias - mantissa_bits;  // ulp of subnormals
  if (unit < smallest) unit = smallest;
  const auto steps = static_cast<int>(std::nearbyint(std::ldexp(magnitude, -unit)));
  // `steps` counts the ulps of this binade from zero. A carry into the next binade needs no extra
  // code.
  return static_cast<uint8_t>(sign | (((unit - smallest) << mantissa_bits) + steps));
}

inline float fp8_to_float(uint8_t code, int mantissa_bits, int bias) {
  const int exponent = (code & 0x7f) >> mantissa_bits;
  const int mantissa = code & ((1 << mantissa_bits) - 1);
  const float magnitude = exponent == 0
                              ? std::ldexp(static_cast<float>(mantissa), 1 - bias - mantissa_bits)
                              : std::ldexp(static_cast<float>(mantissa + (1 << mantissa_bits)),
                                           exponent - bias - mantissa_bits);
  return (code & 0x80) ? -magnitude : magnitude;
}

}  // namespace detail

// Saturates at +-448. Infinities saturate too; NaN stays NaN.
inline uint8_t float_to_f8e4m3(float value) {
  return detail::float_to_fp8(value, 3, 7, 0x7e, 0x7f, 448.0f);
}
inline float f8e4m3_to_float(uint8_t code) {
  if ((code & 0x7f) == 0x7f) return std::bit_cast<float>(0x7fc00000u);
  return detail::fp8_to_float(code, 3, 7);
}

// Saturates at +-57344 like the e4m3 conversion, so that a cache never holds an infinity.
inline uint8_t float_to_f8e5m2(float value) {
  return detail::float_to_fp8(value, 2, 15, 0x7b, 0x7f, 57344.0f);
}
inline float f8e5m2_to_float(uint8_t code) {
  if ((code & 0x7f) > 0x7c) return std::bit_cast<float>(0x7fc00000u);
  if ((code & 0x7f) == 0x7c) return std::bit_cast<float>(code & 0x80 ? 0xff800000u : 0x7f800000u);
  return detail::fp8_to_float(code, 2, 15);
}

// Returns the largest finite magnitude of a floating dtype.
inline float largest_finite(DType dtype) {
  switch (dtype) {
    case DType::f16:
      return 65504.0f;
    case DType::bf16:
      return bf16_to_float(0x7f7f);
    case DType::f8e4m3:
      return 448.0f;
    case DType::f8e5m2:
      return 57344.0f;
    default:
      return FLT_MAX;
  }
}

// Returns one element of any floating dtype as float.
inline float load_float(const void* data, DType dtype, int64_t index) {
  const auto* bytes =
      static_cast<const char*>(data) + index * static_cast<int64_t>(dtype_bytes(dtype));
  switch (dtype) {
    case DType::f32: {
      float value;
      std::memcpy(&value, bytes, 4);
      return value;
    }
    case DType::f16:
    case DType::bf16: {
      uint16_t value;
      std::memcpy(&value, bytes, 2);
      return dtype == DType::f16 ? f16_to_float(value) : bf16_to_float(value);
    }
    case DType::f8e4m3:
      return f8e4m3_to_float(static_cast<uint8_t>(*bytes));
    case DType::f8e5m2:
      return f8e5m2_to_float(static_cast<uint8_t>(*bytes));
    default:
      return std::bit_cast<float>(0x7fc00000u);
  }
}

inline void store_float(void* data, DType dtype, int64_t index, float value) {
  auto* bytes = static_cast<char*>(data) + index * static_cast<int64_t>(dtype_bytes(dtype));
  switch (dtype) {
    case DType::f32:
      std::memcpy(bytes, &value, 4);
      return;
    case DType::f16:
    case DType::bf16: {
      const uint16_t bits = dtype == DType::f16 ? float_to_f16(value) : float_to_bf16(value);
      std::memcpy(bytes, &bits, 2);
      return;
    }
    case DType::f8e4m3:
      *bytes = static_cast<char>(float_to_f8e4m3(value));
      return;
    case DType::f8e5m2:
      *bytes = static_cast<char>(float_to_f8e5m2(value));
      return;
    default:
      return;
  }
}

}  // namespace fovea
