// SPDX-License-Identifier: Apache-2.0
#include "fovea/dtype.h"

#include <array>
#include <utility>

namespace fovea {

std::string_view dtype_name(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return "fp32";
    case DType::f16:
      return "fp16";
    case DType::bf16:
      return "bf16";
    case DType::f8e4m3:
      return "fp8_e4m3";
    case DType::f8e5m2:
      return "fp8_e5m2";
    case DType::i32:
      return "int32";
    case DType::i64:
      return "int64";
    case DType::u8:
      return "uint8";
  }
  return "?";
}

std::optional<DType> parse_dtype(std::string_view name) {
  static constexpr std::array<std::pair<std::string_view, DType>, 18> kNames = {{
      {"fp32", DType::f32},
      {"f32", DType::f32},
      {"float32", DType::f32},
      {"fp16", DType::f16},
      {"f16", DType::f16},
      {"float16", DType::f16},
      {"half", DType::f16},
      {"bf16", DType::bf16},
      {"bfloat16", DType::bf16},
      {"fp8", DType::f8e4m3},
      {"fp8_e4m3", DType::f8e4m3},
      {"f8e4m3", DType::f8e4m3},
      {"e4m3", DType::f8e4m3},
      {"fp8_e5m2", DType::f8e5m2},
      {"f8e5m2", DType::f8e5m2},
      {"int32", DType::i32},
      {"int64", DType::i64},
      {"uint8", DType::u8},
  }};
  for (const auto& [spelling, dtype] : kNames) {
    if (spelling == name) return dtype;
  }
  return std::nullopt;
}

}  // namespace fovea
