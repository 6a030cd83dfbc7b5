// SPDX-License-Identifier: Apache-2.0
// Vectors of f32 from and to every storage type. For sources in kernels/cpu/simd only. Everything
// here has internal linkage, so that the linker never takes code for one instruction set in place
// of another's.
#pragma once

#include <hwy/highway.h>
#include <stdint.h>
#include <string.h>

namespace fovea::kernels::cpu::FOVEA_ISA {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

// Element types as stored in memory.
struct Bf16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};
struct F8E4m3 {
  uint8_t bits;
};
struct F8E5m2 {
  uint8_t bits;
};

using F32Tag = hn::ScalableTag<float>;
using F32 = hn::Vec<F32Tag>;
constexpr F32Tag kF32;
constexpr int32_t kLanes = static_cast<int32_t>(hn::MaxLanes(F32Tag()));

HWY_INLINE F32 load(const float* from) { return hn::LoadU(kF32, from); }

HWY_INLINE F32 load(const Bf16* from) {
  const hn::Rebind<uint16_t, F32Tag> d16;
  const hn::Rebind<uint32_t, F32Tag> d32;
  const auto bits = hn::LoadU(d16, reinterpret_cast<const uint16_t*>(from));
  return hn::BitCast(kF32, hn::ShiftLeft<16>(hn::PromoteTo(d32, bits)));
}

#if HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128
// Highway's emulation of f16 truncates, and does not know infinities.
HWY_INLINE F32 load(const F16* from) {
  const hn::Rebind<uint16_t, F32Tag> d16;
  const hn::Rebind<uint32_t, F32Tag> d32;
  const auto bits = hn::PromoteTo(d32, hn::LoadU(d16, reinterpret_cast<const uint16_t*>(from)));
  const auto sign = hn::ShiftLeft<16>(hn::And(bits, hn::Set(d32, 0x8000)));
  const auto magnitude = hn::And(bits, hn::Set(d32, 0x7fff));
  // As the bits of an f32 the number is too small by a factor of 2^112, subnormal or not.
  const F32 value =
      hn::Mul(hn::BitCast(kF32, hn::ShiftLeft<13>(magnitude)), hn::Set(kF32, 0x1p112f));
  const auto not_finite =
      hn::IfThenElseZero(hn::Gt(magnitude, hn::Set(d32, 0x7bff)), hn::Set(d32, 0x7f800000));
  return hn::BitCast(kF32, hn::Or(hn::Or(hn::BitCast(d32, value), not_finite), sign));
}
#else
HWY_INLINE F32 load(const F16* from) {
  const hn::Rebind<uint16_t, F32Tag> d16;
  const hn::Rebind<hwy::float16_t, F32Tag> half;
  const auto bits = hn::LoadU(d16, reinterpret_cast<const uint16_t*>(from));
  return hn::PromoteTo(kF32, hn::BitCast(half, bits));
}
#endif

// Moved into an f16, the bits of an e4m3 number stand for that number times 2^-8, subnormals
// included. Only NaN needs care: it would read as 480.
HWY_INLINE F32 load(const F8E4m3* from) {
  const hn::Rebind<int8_t, F32Tag> d8;
  const hn::Rebind<int16_t, F32Tag> d16;
  const hn::Rebind<hwy::float16_t, F32Tag> half;
  const auto bytes = hn::PromoteTo(d16, hn::LoadU(d8, reinterpret_cast<const int8_t*>(from)));
  const auto bits = hn::And(hn::ShiftLeft<7>(bytes), hn::Set(d16, static_cast<int16_t>(0xbfff)));
  const F32 value = hn::Mul(hn::PromoteTo(kF32, hn::BitCast(half, bits)), hn::Set(kF32, 256.0f));
  return hn::IfThenElse(hn::Gt(hn::Abs(value), hn::Set(kF32, 448.0f)), hn::NaN(kF32), value);
}

// An e5m2 number is the upper half of an f16.
HWY_INLINE F32 load(const F8E5m2* from) {
  const hn::Rebind<uint8_t, F32Tag> d8;
  const hn::Rebind<uint16_t, F32Tag> d16;
  const hn::Rebind<hwy::float16_t, F32Tag> half;
  const auto bytes = hn::PromoteTo(d16, hn::LoadU(d8, reinterpret_cast<const uint8_t*>(from)));
  return hn::PromoteTo(kF32, hn::BitCast(half, hn::ShiftLeft<8>(bytes)));
}

HWY_INLINE void store(F32 value, float* to) { hn::StoreU(value, kF32, to); }

// Rounds to nearest even. A NaN remains one.
HWY_INLINE void store(F32 value, Bf16* to) {
  const hn::Rebind<uint32_t, F32Tag> d32;
  const hn::Rebind<int32_t, F32Tag> s32;
  const hn::Rebind<uint16_t, F32Tag> d16;
  const auto bits = hn::BitCast(d32, value);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(d32, 1));
  const auto rounded = hn::Add(hn::Add(bits, hn::Set(d32, 0x7fff)), odd);
  const auto quiet = hn::Or(bits, hn::Set(d32, 0x400000));
  const auto is_nan = hn::RebindMask(d32, hn::IsNaN(value));
  const auto upper = hn::ShiftRight<16>(hn::IfThenElse(is_nan, quiet, rounded));
  hn::StoreU(hn::DemoteTo(d16, hn::BitCast(s32, upper)), d16, reinterpret_cast<uint16_t*>(to));
}

#if HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128
HWY_INLINE void store(F32 value, F16* to) {
  const hn::Rebind<uint32_t, F32Tag> d32;
  const hn::Rebind<int32_t, F32Tag> s32;
  const hn::Rebind<uint16_t, F32Tag> d16;
  const auto bits = hn::BitCast(d32, value);
  const auto sign = hn::And(hn::ShiftRight<16>(bits), hn::Set(d32, 0x8000));
  const F32 magnitude = hn::Abs(value);
  const auto wide = hn::BitCast(d32, magnitude);
  const auto odd = hn::And(hn::ShiftRight<13>(wide), hn::Set(d32, 1));
  const auto rounded = hn::ShiftRight<13>(hn::Add(hn::Add(wide, hn::Set(d32, 0xfff)), odd));
  const auto normal = hn::Sub(rounded, hn::Set(d32, 112 << 10));
  // Next to 0.5 one ulp is the step of the subnormals, so the addition rounds to that step.
  const F32 half = hn::Set(kF32, 0.5f);
  const auto subnormal =
      hn::Sub(hn::BitCast(d32, hn::Add(magnitude, half)), hn::BitCast(d32, half));
  const auto is_subnormal = hn::Lt(wide, hn::Set(d32, 0x38800000));
  const auto is_large = hn::Gt(wide, hn::Set(d32, 0x477fefff));  // rounds to infinity
  const auto is_nan = hn::Gt(wide, hn::Set(d32, 0x7f800000));
  auto code = hn::IfThenElse(is_subnormal, subnormal, normal);
  code = hn::IfThenElse(is_large, hn::Set(d32, 0x7c00), code);
  code = hn::IfThenElse(is_nan, hn::Set(d32, 0x7e00), code);
  const auto demoted = hn::DemoteTo(d16, hn::BitCast(s32, hn::Or(sign, code)));
  hn::StoreU(demoted, d16, reinterpret_cast<uint16_t*>(to));
}
#else
HWY_INLINE void store(F32 value, F16* to) {
  const hn::Rebind<uint16_t, F32Tag> d16;
  const hn::Rebind<hwy::float16_t, F32Tag> half;
  hn::StoreU(hn::BitCast(d16, hn::DemoteTo(half, value)), d16, reinterpret_cast<uint16_t*>(to));
}
#endif

// Loads the first `count` < kLanes elements. The others are zero, and their memory is not touched.
template <typename T>
HWY_INLINE F32 load_first(const T* from, int32_t count) {
  alignas(64) T whole[kLanes] = {};
  memcpy(whole, from, static_cast<size_t>(count) * sizeof(T));
  return load(whole);
}

template <typename T>
HWY_INLINE void store_first(F32 value, T* to, int32_t count) {
  alignas(64) T whole[kLanes];
  store(value, whole);
  memcpy(to, whole, static_cast<size_t>(count) * sizeof(T));
}

// Sets to[0, padded) to from[0, count) and then zeros. `padded` is a multiple of kLanes.
template <typename T>
HWY_INLINE void load_row(const T* from, int32_t count, int32_t padded, float* to) {
  int32_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(load(from + i), to + i);
  if (i < count) {
    store(load_first(from + i, count - i), to + i);
    i += kLanes;
  }
  for (; i < padded; i += kLanes) store(hn::Zero(kF32), to + i);
}

template <typename T>
HWY_INLINE void store_row(const float* from, int32_t count, T* to) {
  int32_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(load(from + i), to + i);
  if (i < count) store_first(load(from + i), to + i, count - i);
}

}  // namespace
}  // namespace fovea::kernels::cpu::FOVEA_ISA
