// SPDX-License-Identifier: Apache-2.0
// fp8 numbers 2 * kLanes at a time, for vectors of 256 bits and more.
#pragma once

#include "kernels/cpu/simd/convert.h"

namespace fovea::kernels::cpu::FOVEA_ISA {
namespace {

// table[index] in each lane; the table is the same in each 128-bit block.
template <class V>
HWY_INLINE V one_of_8(V table, V index) {
  const hn::DFromV<V> d16;
  const V bytes = hn::Add(hn::Mul(index, hn::Set(d16, 0x0202)), hn::Set(d16, 0x0100));
  return hn::TableLookupBytes(table, bytes);
}

// As bf16, which holds all of them, by integer operations.
HWY_INLINE auto load_as_bf16(const F8E4m3* from) {
  const hn::Repartition<uint16_t, F32Tag> d16;
  const hn::Rebind<uint8_t, decltype(d16)> d8;
  const auto bits = hn::PromoteTo(d16, hn::LoadU(d8, reinterpret_cast<const uint8_t*>(from)));
  const auto magnitude = hn::And(bits, hn::Set(d16, 0x7f));
  const auto sign = hn::ShiftLeft<8>(hn::Xor(bits, magnitude));
  // The exponent's bias grows from 7 to 127.
  const auto normal = hn::Add(hn::ShiftLeft<4>(magnitude), hn::Set(d16, 120 << 7));
  // n * 2^-9 for n in [0, 8).
  alignas(16) static constexpr uint16_t kSubnormals[8] = {0x0000, 0x3b00, 0x3b80, 0x3bc0,
                                                          0x3c00, 0x3c20, 0x3c40, 0x3c60};
  const auto subnormal = one_of_8(hn::LoadDup128(d16, kSubnormals), hn::And(bits, hn::Set(d16, 7)));
  auto value = hn::IfThenElse(hn::Lt(magnitude, hn::Set(d16, 8)), subnormal, normal);
  value = hn::IfThenElse(hn::Eq(magnitude, hn::Set(d16, 0x7f)), hn::Set(d16, 0x7fc0), value);
  return hn::Or(value, sign);
}

// Only the exponent's bias differs from f16, whose upper byte this is.
HWY_INLINE auto load_as_bf16(const F8E5m2* from) {
  const hn::Repartition<uint16_t, F32Tag> d16;
  const hn::Rebind<uint8_t, decltype(d16)> d8;
  const auto bits = hn::PromoteTo(d16, hn::LoadU(d8, reinterpret_cast<const uint8_t*>(from)));
  const auto magnitude = hn::And(bits, hn::Set(d16, 0x7f));
  const auto sign = hn::ShiftLeft<8>(hn::Xor(bits, magnitude));
  const auto normal = hn::Add(hn::ShiftLeft<5>(magnitude), hn::Set(d16, 112 << 7));
  // n * 2^-16 for n in [0, 4).
  alignas(16) static constexpr uint16_t kSubnormals[8] = {0x0000, 0x3780, 0x3800, 0x3840,
                                                          0x0000, 0x3780, 0x3800, 0x3840};
  const auto subnormal = one_of_8(hn::LoadDup128(d16, kSubnormals), hn::And(bits, hn::Set(d16, 3)));
  // Infinity and NaN have the largest exponent there and here.
  const auto special = hn::Or(hn::ShiftLeft<5>(magnitude), hn::Set(d16, 0x7f80));
  auto value = hn::IfThenElse(hn::Lt(magnitude, hn::Set(d16, 4)), subnormal, normal);
  value = hn::IfThenElse(hn::Lt(magnitude, hn::Set(d16, 0x7c)), value, special);
  return hn::Or(value, sign);
}

HWY_INLINE void halves_to_f32(hn::Vec<hn::Repartition<uint16_t, F32Tag>> f16, F32& a, F32& b) {
  const hn::Half<hn::Repartition<hwy::float16_t, F32Tag>> half;
  const hn::Half<hn::Repartition<uint16_t, F32Tag>> d16;
  a = hn::PromoteTo(kF32, hn::BitCast(half, hn::LowerHalf(d16, f16)));
  b = hn::PromoteTo(kF32, hn::BitCast(half, hn::UpperHalf(d16, f16)));
}

// As f32: the first kLanes numbers, then the others. How e4m3 becomes f16 is in convert.h.
HWY_INLINE void load_pair(const F8E4m3* from, F32& a, F32& b) {
  const hn::Repartition<int16_t, F32Tag> s16;
  const hn::Repartition<uint16_t, F32Tag> d16;
  const hn::Rebind<int8_t, decltype(s16)> d8;
  const auto bytes = hn::PromoteTo(s16, hn::LoadU(d8, reinterpret_cast<const int8_t*>(from)));
  const auto bits = hn::And(hn::BitCast(d16, hn::ShiftLeft<7>(bytes)), hn::Set(d16, 0xbfff));
  const auto nan = hn::Eq(hn::And(bits, hn::Set(d16, 0x3f80)), hn::Set(d16, 0x3f80));
  halves_to_f32(hn::IfThenElse(nan, hn::Set(d16, 0x7e00), bits), a, b);
  a = hn::Mul(a, hn::Set(kF32, 256.0f));
  b = hn::Mul(b, hn::Set(kF32, 256.0f));
}

HWY_INLINE void load_pair(const F8E5m2* from, F32& a, F32& b) {
  const hn::Repartition<uint16_t, F32Tag> d16;
  const hn::Rebind<uint8_t, decltype(d16)> d8;
  const auto bytes = hn::PromoteTo(d16, hn::LoadU(d8, reinterpret_cast<const uint8_t*>(from)));
  halves_to_f32(hn::ShiftLeft<8>(bytes), a, b);
}

template <class T, int kCount>
HWY_INLINE void load_vectors(const T* from, F32 (&to)[kCount]) {
  if constexpr (sizeof(T) == 1 && kCount % 2 == 0) {
    for (int v = 0; v < kCount; v += 2) load_pair(from + v * kLanes, to[v], to[v + 1]);
  } else {
    for (int v = 0; v < kCount; ++v) to[v] = load(from + v * kLanes);
  }
}

}  // namespace
}  // namespace fovea::kernels::cpu::FOVEA_ISA
