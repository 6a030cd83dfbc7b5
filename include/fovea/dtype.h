// SPDX-License-Identifier: Apache-2.0
// Element types of tensors, weights and caches.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

#include "fovea/api.h"

namespace FOVEA_API fovea {

enum class DType : uint8_t {
  f32,
  f16,     // IEEE binary16
  bf16,    // upper half of f32
  f8e4m3,  // OCP e4m3fn: finite, saturates at +-448
  f8e5m2,  // OCP e5m2: has infinities
  i32,
  i64,
  u8,
};

// Returns the bytes of one element.
constexpr size_t dtype_bytes(DType dtype) {
  switch (dtype) {
    case DType::f32:
    case DType::i32:
      return 4;
    case DType::f16:
    case DType::bf16:
      return 2;
    case DType::i64:
      return 8;
    case DType::f8e4m3:
    case DType::f8e5m2:
    case DType::u8:
      return 1;
  }
  return 0;
}

constexpr bool is_fp8(DType dtype) { return dtype == DType::f8e4m3 || dtype == DType::f8e5m2; }

constexpr bool is_floating(DType dtype) {
  return dtype == DType::f32 || dtype == DType::f16 || dtype == DType::bf16 || is_fp8(dtype);
}

// Returns the name that the CLI, explain() and error messages use: "fp32", "bf16", "fp8_e4m3", ...
std::string_view dtype_name(DType dtype);

// Parses these names and the usual synonyms ("float32", "half", "fp8"). nullopt: unknown.
std::optional<DType> parse_dtype(std::string_view name);

}  // namespace fovea
