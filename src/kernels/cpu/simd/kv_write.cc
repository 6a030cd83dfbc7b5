// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/simd/kv_write.h"

#include <float.h>

#include "kernels/cpu/simd/convert.h"

namespace fovea::kernels::cpu::FOVEA_ISA {
namespace {

// Rounds to nearest even in the format with `mantissa_bits` and exponent bias `bias`. Saturates at
// `largest`; a NaN becomes 0x7f with its sign.
template <int mantissa_bits, int bias>
HWY_INLINE void store_fp8(F32 value, float largest, uint8_t* to) {
  constexpr int kDropped = 23 - mantissa_bits;
  const hn::Rebind<uint32_t, F32Tag> d32;
  const hn::Rebind<int32_t, F32Tag> s32;
  const hn::Rebind<uint8_t, F32Tag> d8;
  const auto bits = hn::BitCast(d32, value);
  const auto sign = hn::And(hn::ShiftRight<24>(bits), hn::Set(d32, 0x80));
  const F32 magnitude = hn::Min(hn::Abs(value), hn::Set(kF32, largest));

  // Normal results: round the remaining bits; a carry moves into the exponent by itself.
  const auto wide = hn::BitCast(d32, magnitude);
  const auto odd = hn::And(hn::ShiftRight<kDropped>(wide), hn::Set(d32, 1));
  const auto half = hn::Set(d32, (1u << (kDropped - 1)) - 1);
  const auto rounded = hn::ShiftRight<kDropped>(hn::Add(hn::Add(wide, half), odd));
  const auto normal = hn::Sub(rounded, hn::Set(d32, (127u - bias) << mantissa_bits));

  // Subnormal results: next to this constant one ulp is their step, so the addition rounds to that
  // step.
  constexpr uint32_t kStepExponent = 127 + 1 - bias - mantissa_bits + 23;
  const auto step = hn::Set(d32, kStepExponent << 23);
  const auto subnormal =
      hn::Sub(hn::BitCast(d32, hn::Add(magnitude, hn::BitCast(kF32, step))), step);
  const auto is_subnormal =
      hn::RebindMask(d32, hn::Lt(magnitude, hn::BitCast(kF32, hn::Set(d32, (128u - bias) << 23))));

  const auto is_nan = hn::RebindMask(d32, hn::IsNaN(value));
  const auto finite = hn::IfThenElse(is_subnormal, subnormal, normal);
  const auto code = hn::Or(sign, hn::IfThenElse(is_nan, hn::Set(d32, 0x7f), finite));
  hn::StoreU(hn::DemoteTo(d8, hn::BitCast(s32, code)), d8, to);
}

HWY_INLINE void store(F32 value, F8E4m3* to) {
  store_fp8<3, 7>(value, 448.0f, reinterpret_cast<uint8_t*>(to));
}
HWY_INLINE void store(F32 value, F8E5m2* to) {
  store_fp8<2, 15>(value, 57344.0f, reinterpret_cast<uint8_t*>(to));
}

HWY_INLINE F32 scaled(const CacheRowWrite& row, F32 value) {
  value = hn::Div(value, hn::Set(kF32, row.scale));
  if (row.finite_limit == 0) return value;
  const F32 limit = hn::Set(kF32, row.finite_limit);
  const F32 number = hn::IfThenElse(hn::IsNaN(value), hn::Zero(kF32), value);
  return hn::Max(hn::Neg(limit), hn::Min(number, limit));
}

template <typename From, typename To>
void write_row(const CacheRowWrite& row) {
  const auto* from = static_cast<const From*>(row.from);
  auto* to = static_cast<To*>(row.to);
  int32_t i = 0;
  for (; i + kLanes <= row.dim; i += kLanes) store(scaled(row, load(from + i)), to + i);
  if (i < row.dim) {
    store_first(scaled(row, load_first(from + i, row.dim - i)), to + i, row.dim - i);
  }
}

template <typename From>
void write_row_from(const CacheRowWrite& row) {
  switch (row.to_dtype) {
    case DType::f32:
      return write_row<From, float>(row);
    case DType::f16:
      return write_row<From, F16>(row);
    case DType::bf16:
      return write_row<From, Bf16>(row);
    case DType::f8e4m3:
      return write_row<From, F8E4m3>(row);
    case DType::f8e5m2:
      return write_row<From, F8E5m2>(row);
    default:
      return;
  }
}

template <typename From>
float largest_magnitude_of(const From* from, int32_t dim) {
  F32 largest = hn::Zero(kF32);
  const auto take = [&](F32 value) HWY_ATTR {
    const F32 magnitude = hn::Abs(value);
    const auto is_finite = hn::Le(magnitude, hn::Set(kF32, FLT_MAX));
    largest = hn::Max(largest, hn::IfThenElseZero(is_finite, magnitude));
  };
  int32_t i = 0;
  for (; i + kLanes <= dim; i += kLanes) take(load(from + i));
  if (i < dim) take(load_first(from + i, dim - i));
  return hn::GetLane(hn::MaxOfLanes(kF32, largest));
}

}  // namespace

void write_cache_row(const CacheRowWrite& row) {
  if (row.from_dtype == DType::f32) return write_row_from<float>(row);
  if (row.from_dtype == DType::f16) return write_row_from<F16>(row);
  write_row_from<Bf16>(row);
}

float largest_magnitude(const void* from, DType dtype, int32_t dim) {
  if (dtype == DType::f32) return largest_magnitude_of(static_cast<const float*>(from), dim);
  if (dtype == DType::f16) return largest_magnitude_of(static_cast<const F16*>(from), dim);
  return largest_magnitude_of(static_cast<const Bf16*>(from), dim);
}

}  // namespace fovea::kernels::cpu::FOVEA_ISA
