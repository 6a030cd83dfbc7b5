// SPDX-License-Identifier: Apache-2.0
// Transposes in registers: rows of keys become vectors of one dim of many keys, and queries become
// blocks of interleaved rows.
#pragma once

#include "kernels/cpu/simd/attention/blocks.h"
#include "kernels/cpu/simd/attention/prefetch.h"

namespace fovea::kernels::cpu::FOVEA_ISA {
namespace {

// Transposes 4 x 4 elements in each 128-bit block: out[i] block b lane j = in[j] block b lane i.
HWY_INLINE void transpose_blocks(const F32 (&in)[4], F32 (&out)[4]) {
  const hn::Repartition<double, F32Tag> pairs;
  const auto low01 = hn::BitCast(pairs, hn::InterleaveLower(kF32, in[0], in[1]));
  const auto low23 = hn::BitCast(pairs, hn::InterleaveLower(kF32, in[2], in[3]));
  const auto high01 = hn::BitCast(pairs, hn::InterleaveUpper(kF32, in[0], in[1]));
  const auto high23 = hn::BitCast(pairs, hn::InterleaveUpper(kF32, in[2], in[3]));
  out[0] = hn::BitCast(kF32, hn::InterleaveLower(pairs, low01, low23));
  out[1] = hn::BitCast(kF32, hn::InterleaveUpper(pairs, low01, low23));
  out[2] = hn::BitCast(kF32, hn::InterleaveLower(pairs, high01, high23));
  out[3] = hn::BitCast(kF32, hn::InterleaveUpper(pairs, high01, high23));
}

// Returns a vector whose 128-bit block b holds the 4 floats at from + 4 * b * stride.
HWY_INLINE F32 load_blocks(const float* from, int64_t stride) {
  F32 value = hn::LoadDup128(kF32, from);
  const hn::Rebind<int32_t, F32Tag> d32;
  const auto lane = hn::Iota(d32, 0);
  for (int32_t b = 1; b < kLanes / 4; ++b) {
    const auto above = hn::RebindMask(kF32, hn::Gt(lane, hn::Set(d32, 4 * b - 1)));
    value = hn::IfThenElse(above, hn::LoadDup128(kF32, from + 4 * b * stride), value);
  }
  return value;
}

// Transposed keys: [dim, kPanelKeys], or for lane blocks groups of [dim, kLaneKeys].
template <bool kGroups>
struct KeyPanel {
  float* to;
  int32_t dim;

  // Stores element d of keys [key, key + kLanes).
  HWY_INLINE void set(int32_t key, int32_t d, F32 keys) const {
    if constexpr (kGroups) {
      const hn::Half<F32Tag> half;
      float* group = to + key * dim + d * kLaneKeys;
      hn::StoreU(hn::LowerHalf(half, keys), half, group);
      hn::StoreU(hn::UpperHalf(half, keys), half, group + kLaneKeys * dim);
    } else {
      store(keys, to + d * kPanelKeys + key);
    }
  }
};

// Fills a panel from kPanelKeys rows that are `stride` floats apart. panel.dim is a multiple of 4.
template <bool kGroups>
inline void transpose_panel(const float* rows, int64_t stride, const KeyPanel<kGroups>& panel) {
  for (int32_t half = 0; half < 2; ++half) {
    const float* from = rows + half * kLanes * stride;
    for (int32_t d = 0; d < panel.dim; d += 4) {
      // Vector j holds keys j, 4 + j, 8 + j, ..., one in each 128-bit block.
      const F32 keys[4] = {load_blocks(from + d, stride), load_blocks(from + d + stride, stride),
                           load_blocks(from + d + 2 * stride, stride),
                           load_blocks(from + d + 3 * stride, stride)};
      F32 dims[4];
      transpose_blocks(keys, dims);
      for (int32_t i = 0; i < 4; ++i) panel.set(half * kLanes, d + i, dims[i]);
    }
  }
}

// Transposes 128-bit blocks: out[4 * b + i] block g = in[g][i] block b.
HWY_INLINE void gather_blocks(const F32 (&in)[kLanes / 4][4], F32 (&out)[kLanes]) {
  for (int i = 0; i < 4; ++i) {
#if HWY_TARGET == HWY_AVX3
    const __m512 low01 = _mm512_shuffle_f32x4(in[0][i].raw, in[1][i].raw, 0x44);
    const __m512 low23 = _mm512_shuffle_f32x4(in[2][i].raw, in[3][i].raw, 0x44);
    const __m512 high01 = _mm512_shuffle_f32x4(in[0][i].raw, in[1][i].raw, 0xee);
    const __m512 high23 = _mm512_shuffle_f32x4(in[2][i].raw, in[3][i].raw, 0xee);
    out[i].raw = _mm512_shuffle_f32x4(low01, low23, 0x88);
    out[4 + i].raw = _mm512_shuffle_f32x4(low01, low23, 0xdd);
    out[8 + i].raw = _mm512_shuffle_f32x4(high01, high23, 0x88);
    out[12 + i].raw = _mm512_shuffle_f32x4(high01, high23, 0xdd);
#else
    out[i] = hn::ConcatLowerLower(kF32, in[1][i], in[0][i]);
    out[4 + i] = hn::ConcatUpperUpper(kF32, in[1][i], in[0][i]);
#endif
  }
}

// Dims in one lane during a transpose: an f32, or two neighbouring bf16 elements of a key.
template <class T>
constexpr int32_t kDimsPerLane = sizeof(T) == 4 ? 1 : 2;

HWY_INLINE F32 load_lanes(const float* from) { return load(from); }
HWY_INLINE F32 load_lanes(const Bf16* from) { return load(reinterpret_cast<const float*>(from)); }
// Returns dim i of the dims that each lane holds.
template <int kDims>
HWY_INLINE F32 dim_of(F32 lanes, int i) {
  if constexpr (kDims == 1) return lanes;
  const hn::Rebind<uint32_t, F32Tag> d32;
  const auto bits = hn::BitCast(d32, lanes);
  if (i == 0) return hn::BitCast(kF32, hn::ShiftLeft<16>(bits));
  return hn::BitCast(kF32, hn::And(bits, hn::Set(d32, 0xffff0000u)));
}

// Transposes one line of each of kLanes keys: lanes[i] lane j = lane i, from element d on, of key
// first + j. Prefetches as many lines; a row of keys has `row_lines`. Without unrolling GCC moves
// the blocks through the stack.
template <class T>
HWY_INLINE void transpose_lines(const RowPointers& keys, int32_t row_lines, int32_t first,
                                int32_t d, F32 (&lanes)[kLanes]) {
  constexpr int32_t kLines = kLanes / 4;
  const int64_t at = d * static_cast<int64_t>(sizeof(T));
  const auto line = static_cast<size_t>(first * row_lines + d / (kLanes * kDimsPerLane<T>)*kLanes);
  F32 blocks[kLanes / 4][4];
#pragma GCC unroll 4
  for (int g = 0; g < kLanes / 4; ++g) {
    keys.template prefetch<T, kLines>(line, g);
    F32 rows[4];
    for (int j = 0; j < 4; ++j) {
      rows[j] = load_lanes(reinterpret_cast<const T*>(keys.row(first, 4 * g + j, at)));
    }
    transpose_blocks(rows, blocks[g]);
  }
  gather_blocks(blocks, lanes);
}

// Fills a panel straight from the rows of the cache and reads each line once. panel.dim is a
// multiple of the dims in a vector of lanes.
template <class T, bool kGroups>
inline void transpose_from_rows(const T*, const RowPointers& keys, KeyPanel<kGroups> panel) {
  constexpr int32_t kDims = kDimsPerLane<T>;
  for (int32_t half = 0; half < kPanelKeys; half += kLanes) {
    for (int32_t d = 0; d < panel.dim; d += kLanes * kDims) {
      F32 lanes[kLanes];
      transpose_lines<T>(keys, panel.dim / (kLanes * kDims), half, d, lanes);
#pragma GCC unroll 32
      for (int i = 0; i < kLanes * kDims; ++i) {
        panel.set(half, d + i, dim_of<kDims>(lanes[i / kDims], i % kDims));
      }
    }
  }
}

// Sets block[d * width + r] = rows[r][d] for r < count <= kLanes. Rows are `stride` floats apart.
inline void interleave_rows(const float* rows, int64_t stride, int32_t count, int32_t dim,
                            int32_t width, float* block) {
  const auto lanes = hn::FirstN(kF32, static_cast<size_t>(count));
  for (int32_t d = 0; d < dim; d += kLanes) {
    F32 blocks[kLanes / 4][4];
    for (int32_t g = 0; g < kLanes / 4; ++g) {
      F32 four[4];
      for (int32_t j = 0; j < 4; ++j) {
        const int32_t r = 4 * g + j;
        four[j] = r < count ? load(rows + r * stride + d) : hn::Zero(kF32);
      }
      transpose_blocks(four, blocks[g]);
    }
    F32 dims[kLanes];
    gather_blocks(blocks, dims);
    for (int32_t i = 0; i < kLanes; ++i) {
      hn::BlendedStore(dims[i], lanes, kF32, block + (d + i) * width);
    }
  }
}

}  // namespace
}  // namespace fovea::kernels::cpu::FOVEA_ISA
