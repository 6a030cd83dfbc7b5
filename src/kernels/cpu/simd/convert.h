// SPDX-License-Identifier: Apache-2.0
// Vectors of f32 from and to every storage type. For sources in kernels/cpu/simd only: all of it
// has internal linkage, so that code for one instruction set is never picked for another.
#pragma once

#include <stdint.h>
#include <string.h>

#include "hwy/highway.h"

namespace fovea::kernels::cpu::FOVEA_ISA {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

// Element types as they lie in memory.
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

HWY_INLINE F32 load(const F16* from) {
  const hn::Rebind<uint16_t, F32Tag> d16;
  const hn::Rebind<hwy::float16_t, F32Tag> half;
  const auto bits = hn::LoadU(d16, reinterpret_cast<const uint16_t*>(from));
  return hn::PromoteTo(kF32, hn::BitCast(half, bits));
}

// The bits of an e4m3 number, moved into an f16, are that number times 2^-8: exact, subnormals
// included. Only the NaN needs care; it would read as 480.
HWY_INLINE F32 load(const F8E4m3* from) {
  const hn::Rebind<int8_t, F32Tag> d8;
  const hn::Rebind<int16_t, F32Tag> d16;
  const hn::Rebind<hwy::float16_t, F32Tag> half;
  const auto bytes = hn::PromoteTo(d16, hn::LoadU(d8, reinterpret_cast<const int8_t*>(from)));
  const auto bits = hn::And(hn::ShiftLeft<7>(bytes), hn::Set(d16, static_cast<int16_t>(0xbfff)));
  const F32 value = hn::Mul(hn::PromoteTo(kF32, hn::BitCast(half, bits)), hn::Set(kF32, 256.0f));
  return hn::IfThenElse(hn::Gt(hn::Abs(value), hn::Set(kF32, 448.0f)), hn::NaN(kF32), value);
}

// e5m2 is the upper half of an f16.
HWY_INLINE F32 load(const F8E5m2* from) {
  const hn::Rebind<uint8_t, F32Tag> d8;
  const hn::Rebind<uint16_t, F32Tag> d16;
  const hn::Rebind<hwy::float16_t, F32Tag> half;
  const auto bytes = hn::PromoteTo(d16, hn::LoadU(d8, reinterpret_cast<const uint8_t*>(from)));
  return hn::PromoteTo(kF32, hn::BitCast(half, hn::ShiftLeft<8>(bytes)));
}

HWY_INLINE void store(F32 value, float* to) { hn::StoreU(value, kF32, to); }

// Round to nearest even; a NaN stays one.
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

HWY_INLINE void store(F32 value, F16* to) {
  const hn::Rebind<uint16_t, F32Tag> d16;
  const hn::Rebind<hwy::float16_t, F32Tag> half;
  hn::StoreU(hn::BitCast(d16, hn::DemoteTo(half, value)), d16, reinterpret_cast<uint16_t*>(to));
}

// The first `count` < kLanes elements; the others are zero and their memory is not touched.
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

// to[0, padded) = from[0, count), then zeros. `padded` is a multiple of kLanes.
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
