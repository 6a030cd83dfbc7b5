// SPDX-License-Identifier: Apache-2.0
// Conversion of fp8 numbers, 2 * kLanes at a time. Needs vectors of at least 256 bits.
#pragma once

#include "kernels/cpu/simd/convert.h"

namespace fovea::kernels::cpu::FOVEA_ISA {
namespace {

// Returns table[index] in each lane. Each 128-bit block holds the same table.
template <class V>
HWY_INLINE V one_of_8(V table, V index) {
  const hn::DFromV<V> d16;
  const V bytes = hn::Add(hn::Mul(index, hn::Set(d16, 0x0202)), hn::Set(d16, 0x0100));
  return hn::TableLookupBytes(table, bytes);
}

// Returns the numbers as bf16, which represents all of them, by integer operations.
HWY_INLINE auto load_as_bf16(const F8E4m3* from) {
  const hn::Repartition<uint16_t, F32Tag> d16;
  const hn::Rebind<uint8_t, decltype(d16)> d8;
  const auto bits = hn::PromoteTo(d16, hn::LoadU(d8, reinterpret_cast<const uint8_t*>(from)));
  const auto magnitude = hn::And(bits, hn::Set(d16, 0x7f));
  const auto sign = hn::ShiftLeft<8>(hn::Xor(bits, magnitude));
  // The bias of the exponent grows from 7 to 127.
  const auto normal = hn::Add(hn::ShiftLeft<4>(magnitude), hn::Set(d16, 120 << 7));
  // n * 2^-9 for n in [0, 8).
  alignas(16) static constexpr uint16_t kSubnormals[8] = {0x0000, 0x3b00, 0x3b80, 0x3bc0,
                                                          0x3c00, 0x3c20, 0x3c40, 0x3c60};
  const auto subnormal = one_of_8(hn::LoadDup128(d16, kSubnormals), hn::And(bits, hn::Set(d16, 7)));
  auto value = hn::IfThenElse(hn::Lt(magnitude, hn::Set(d16, 8)), subnormal, normal);
  value = hn::IfThenElse(hn::Eq(magnitude, hn::Set(d16, 0x7f)), hn::Set(d16, 0x7fc0), value);
  return hn::Or(value, sign);
}

// e5m2 is the upper byte of an f16; only the bias of the exponent changes.
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
  // Infinity and NaN have the largest exponent in both formats.
  const auto special = hn::Or(hn::ShiftLeft<5>(magnitude), hn::Set(d16, 0x7f80));
  auto value = hn::IfThenElse(hn::Lt(magnitude, hn::Set(d16, 4)), subnormal, normal);
  value = hn::IfThenElse(hn::Lt(magnitude, hn::Set(d16, 0x7c)), value, special);
  return hn::Or(value, sign);
}

// An fp8 number of either type that is converted by a lookup in Bf16Bytes.
struct Fp8ByTable {
  uint8_t bits;
};

// The low and high byte of the bf16 number of each magnitude of an fp8 type.
struct Bf16Bytes {
  alignas(64) uint8_t low[128];
  alignas(64) uint8_t high[128];
};

// Rows of fp8 numbers: row n starts at rows[n] + offset.
struct ByteRows {
  const char* const* rows;
  int64_t offset;
};

template <class T>
inline Bf16Bytes make_bf16_bytes() {
  constexpr int32_t kCount = 2 * kLanes;
  Bf16Bytes bytes;
  for (int32_t first = 0; first < 128; first += kCount) {
    T numbers[kCount];
    for (int32_t i = 0; i < kCount; ++i) numbers[i].bits = static_cast<uint8_t>(first + i);
    uint16_t bf16[kCount];
    hn::StoreU(load_as_bf16(numbers), hn::Repartition<uint16_t, F32Tag>(), bf16);
    for (int32_t i = 0; i < kCount; ++i) {
      bytes.low[first + i] = static_cast<uint8_t>(bf16[i]);
      bytes.high[first + i] = static_cast<uint8_t>(bf16[i] >> 8);
    }
  }
  return bytes;
}

template <class T>
inline const Bf16Bytes& bf16_bytes() {
  static const Bf16Bytes bytes = make_bf16_bytes<T>();
  return bytes;
}

// Returns whether this CPU has the byte lookups below.
inline bool has_byte_lookup() {
#if HWY_TARGET == HWY_AVX3
  static const bool has = __builtin_cpu_supports("avx512vbmi");
  return has;
#else
  return false;
#endif
}

#if HWY_TARGET == HWY_AVX3
// Looks up the low 7 bits of each byte of `index` in the table of the bytes of a (0 to 63) and b
// (64 to 127). Assembly, as this source is compiled for CPUs without AVX512-VBMI too.
HWY_INLINE __m512i lookup_bytes(__m512i a, __m512i b, __m512i index) {
  asm("vpermi2b %2, %1, %0" : "+v"(index) : "v"(a), "v"(b));
  return index;
}
// Returns the bytes of x in the given order.
HWY_INLINE __m512i permute_bytes(__m512i x, __m512i order) {
  asm("vpermb %0, %1, %0" : "+v"(x) : "v"(order));
  return x;
}

// The order in which 64 numbers enter the lookup, such that interleaving their low and high bytes
// gives four vectors: two registers of pairs of bf16 numbers, the lower and the upper half of each
// lane. Lane l of vector i is number l * kLaneStep + i * kVectorStep.
template <int kLaneStep, int kVectorStep>
struct InterleavedOrder {
  alignas(64) uint8_t numbers[64];
  constexpr InterleavedOrder() : numbers() {
    for (int at = 0; at < 64; ++at) {
      const int lane = at / 16 * 4 + at % 8 / 2;
      const int vector = at % 16 / 8 * 2 + at % 2;
      numbers[at] = static_cast<uint8_t>(lane * kLaneStep + vector * kVectorStep);
    }
  }
};
template <int kLaneStep, int kVectorStep>
inline constexpr InterleavedOrder<kLaneStep, kVectorStep> kInterleavedOrder;

class Fp8Converter {
 public:
  HWY_INLINE explicit Fp8Converter(const Bf16Bytes& bytes)
      : low0_(_mm512_load_si512(bytes.low)),
        low1_(_mm512_load_si512(bytes.low + 64)),
        high0_(_mm512_load_si512(bytes.high)),
        high1_(_mm512_load_si512(bytes.high + 64)) {}

  // Looks up the two bytes of each bf16 number.
  HWY_INLINE void split(__m512i x, __m512i& low, __m512i& high) const {
    low = lookup_bytes(low0_, low1_, x);
    const __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80));
    high = _mm512_ternarylogic_epi64(lookup_bytes(high0_, high1_, x), x, sign, 0xf8);
  }

  // Sets lane l of to[first + i] to number l * kLaneStep + i * kVectorStep of the 64 in x, for i
  // < 4. The last step uses shifts and masks, which run in parallel with multiply-adds; further
  // lookups would compete with them (chosen 2026-11-22: 20 % fewer cycles for values).
  template <int kLaneStep, int kVectorStep, int kCount>
  HWY_INLINE void to_f32(__m512i x, F32 (&to)[kCount], int first) const {
    const __m512i order = _mm512_load_si512(kInterleavedOrder<kLaneStep, kVectorStep>.numbers);
    __m512i low, high;
    split(permute_bytes(x, order), low, high);
    const __m512i halves[2] = {_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)};
    const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    for (int i = 0; i < 4 && first + i < kCount; ++i) {
      const __m512i half = halves[i / 2];
      to[first + i].raw = _mm512_castsi512_ps(i % 2 == 0 ? _mm512_slli_epi32(half, 16)
                                                         : _mm512_and_si512(half, upper));
    }
  }

 private:
  __m512i low0_, low1_, high0_, high1_;
};

template <class T>
void unpack_fp8_by_table(ByteRows rows, int32_t begin, int32_t end, int32_t dim, Bf16* to) {
  const Fp8Converter convert(bf16_bytes<T>());
  const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);  // undone by the interleaving
  for (int32_t n = begin; n < end; ++n) {
    const char* from = rows.rows[n] + rows.offset;
    Bf16* row = to + n * dim;
    for (int32_t d = 0; d < dim; d += 64) {
      const bool whole = dim - d >= 64;
      const __mmask8 loaded = whole ? 0xff : 0x0f;
      const __m512i x = _mm512_permutexvar_epi64(order, _mm512_maskz_loadu_epi64(loaded, from + d));
      __m512i low, high;
      convert.split(x, low, high);
      _mm512_storeu_si512(row + d, _mm512_unpacklo_epi8(low, high));
      if (whole) _mm512_storeu_si512(row + d + 32, _mm512_unpackhi_epi8(low, high));
    }
  }
}
#endif

// Converts rows [begin, end) to rows of `dim` bf16 numbers in `to`. `dim` is a multiple of 2 *
// kLanes. Exact.
template <class T>
inline void unpack_fp8(ByteRows rows, int32_t begin, int32_t end, int32_t dim, Bf16* to) {
#if HWY_TARGET == HWY_AVX3
  if (has_byte_lookup()) return unpack_fp8_by_table<T>(rows, begin, end, dim, to);
#endif
  const hn::Repartition<uint16_t, F32Tag> d16;
  for (int32_t n = begin; n < end; ++n) {
    const T* from = reinterpret_cast<const T*>(rows.rows[n] + rows.offset);
    for (int32_t d = 0; d < dim; d += 2 * kLanes) {
      hn::StoreU(load_as_bf16(from + d), d16, &to[n * dim + d].bits);
    }
  }
}

inline void unpack_fp8(DType dtype, ByteRows rows, int32_t begin, int32_t end, int32_t dim,
                       Bf16* to) {
  if (dtype == DType::f8e4m3) {
    unpack_fp8<F8E4m3>(rows, begin, end, dim, to);
  } else {
    unpack_fp8<F8E5m2>(rows, begin, end, dim, to);
  }
}

// Returns the table of an fp8 type.
inline const Bf16Bytes& fp8_bytes(DType dtype) {
  return dtype == DType::f8e4m3 ? bf16_bytes<F8E4m3>() : bf16_bytes<F8E5m2>();
}

}  // namespace
}  // namespace fovea::kernels::cpu::FOVEA_ISA
