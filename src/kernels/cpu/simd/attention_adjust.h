// SPDX-License-Identifier: Apache-2.0
// From products to scores: scales of keys, soft cap, ALiBi, and keys that a row does not see. The
// functions change the vectors [first, last) of a row of scores.
#pragma once

#include "kernels/cpu/simd/attention_rows.h"
#include "kernels/cpu/simd/attention_softmax.h"
#include "kernels/cpu/simd/attention_work.h"

namespace fovea::kernels::cpu::FOVEA_ISA {
namespace {

// Up to kProductRows consecutive rows of a head; `first` is the first one's place.
struct RowBlock {
  int32_t first;
  int32_t rows;
  int32_t begin, end;              // keys that some row sees lie within
  int32_t inner_begin, inner_end;  // keys that every row sees
  int32_t predicate_begin;
};

// bounds: of all rows of the head.
inline RowBlock row_block(const RowBounds* bounds, int32_t first, int32_t rows) {
  RowBlock block;
  block.first = first;
  block.rows = rows;
  block.begin = block.inner_end = INT32_MAX;
  block.end = block.inner_begin = 0;
  block.predicate_begin = INT32_MAX;
  for (int32_t r = first; r < first + rows; ++r) {
    const RowBounds& row = bounds[r];
    const bool prefix = row.prefix_end > row.prefix_begin;
    block.begin = smaller(block.begin, prefix ? row.prefix_begin : row.begin);
    block.end = larger(block.end, row.end);
    block.inner_begin = larger(block.inner_begin, row.begin);
    block.inner_end = smaller(block.inner_end, row.end);
    block.predicate_begin = smaller(block.predicate_begin, row.predicate_begin);
  }
  return block;
}

// The scales of 4 heads for kLanes keys of the tile from `first` on; `scales`: those of the first
// of the heads.
HWY_INLINE void load_scales_of_4(const TileKeys& tile, int32_t first, const float* scales,
                                 F32 (&heads)[4]) {
  const hn::Rebind<int32_t, F32Tag> d32;
  F32 keys[4];  // [j] block b: key 4 * b + j
  for (int32_t j = 0; j < 4; ++j) {
    const int64_t* at = tile.scale + first + j;
    keys[j] = hn::LoadDup128(kF32, scales + at[0]);
    for (int32_t b = 1; b < kLanes / 4; ++b) {
      const auto from_b = hn::RebindMask(kF32, hn::Gt(hn::Iota(d32, 0), hn::Set(d32, 4 * b - 1)));
      keys[j] = hn::IfThenElse(from_b, hn::LoadDup128(kF32, scales + at[4 * b]), keys[j]);
    }
  }
  transpose_blocks(keys, heads);
}

// to[head * kTileKeys + n] = the scale of key n of the tile and a head, for `heads` of them, the
// first at `scales`; 0 for keys the request does not own.
inline void load_scales(const TileKeys& tile, const float* scales, int32_t heads, float* to) {
  int32_t head = 0;
  const bool whole = tile.begin == 0 && tile.end == kTileKeys;
  for (; whole && head + 4 <= heads; head += 4) {
    for (int32_t n = 0; n < kTileKeys; n += kLanes) {
      F32 four[4];
      load_scales_of_4(tile, n, scales + head, four);
      for (int32_t i = 0; i < 4; ++i) store(four[i], to + (head + i) * kTileKeys + n);
    }
  }
  for (; head < heads; ++head) {
    for (int32_t n = 0; n < kTileKeys; ++n) {
      const bool owned = n >= tile.begin && n < tile.end;
      to[head * kTileKeys + n] = owned ? scales[tile.scale[n] + head] : 0.0f;
    }
  }
}

inline void scale_scores(const float* key_scales, int32_t first, int32_t last, float* scores) {
  for (int32_t v = first * kLanes; v < last * kLanes; v += kLanes) {
    store(hn::Mul(load(scores + v), load(key_scales + v)), scores + v);
  }
}

// factor: what scores are to be multiplied by for units of log2. They have those afterwards.
inline void cap_scores(float factor, float cap, int32_t first, int32_t last, float* scores) {
  const F32 inner = hn::Set(kF32, factor * kLn2 / cap);
  const F32 outer = hn::Set(kF32, kLog2E * cap);
  for (int32_t v = first * kLanes; v < last * kLanes; v += kLanes) {
    store(hn::Mul(tanh_of(hn::Mul(load(scores + v), inner)), outer), scores + v);
  }
}

// slope: in units of log2. factor as above; position: the row's.
inline void add_alibi(float slope, const float* key_positions, int32_t position, float factor,
                      int32_t first, int32_t last, float* scores) {
  const F32 slopes = hn::Set(kF32, slope);
  const F32 factors = hn::Set(kF32, factor);
  const F32 from = hn::Set(kF32, static_cast<float>(position));
  for (int32_t v = first * kLanes; v < last * kLanes; v += kLanes) {
    const F32 distance = hn::Sub(load(key_positions + v), from);
    store(hn::MulAdd(slopes, distance, hn::Mul(load(scores + v), factors)), scores + v);
  }
}

// tile: its first key.
inline void hide_outside(const RowBounds& row, int32_t tile, int32_t first, int32_t last,
                         float* scores) {
  const hn::Rebind<int32_t, F32Tag> d32;
  const auto before = hn::Set(d32, row.begin - 1);
  const auto end = hn::Set(d32, row.end);
  const auto before_prefix = hn::Set(d32, row.prefix_begin - 1);
  const auto prefix_end = hn::Set(d32, row.prefix_end);
  for (int32_t v = first * kLanes; v < last * kLanes; v += kLanes) {
    const auto key = hn::Iota(d32, tile + v);
    const auto inside = hn::And(hn::Gt(key, before), hn::Lt(key, end));
    const auto in_prefix = hn::And(hn::Gt(key, before_prefix), hn::Lt(key, prefix_end));
    const auto seen = hn::RebindMask(kF32, hn::Or(inside, in_prefix));
    store(hn::IfThenElse(seen, load(scores + v), hn::Set(kF32, -kInfinity)), scores + v);
  }
}

// A tile's keys as the rows of a head meet them.
struct KeysOfHead {
  int32_t tile;         // its first key
  int32_t begin, end;   // those there are, from `tile` on
  int64_t head;         // kv head
  float factor;         // of products, for scores in units of log2
  const float* scales;  // [kTileKeys], or null
};

// Turns products of an item into masked scores. What it refers to outlives it.
class ScoreAdjuster {
 public:
  // bounds: of all rows of a head; group: q heads of a kv head.
  ScoreAdjuster(const AttentionParams& params, const AttentionItem& item, const MaskView& mask,
                const RowBounds* bounds, int32_t group)
      : params_(params), item_(item), mask_(mask), bounds_(bounds), group_(group) {}

  // scores: [rows of the block, kTileKeys], products before. Whole vectors around [begin, end) are
  // valid afterwards. They are to be multiplied by keys.factor, unless a cap or ALiBi has made them
  // units of log2.
  void adjust(const RowBlock& block, const KeysOfHead& keys, int32_t begin, int32_t end,
              float* scores) {
    const int32_t first = begin / kLanes;
    const int32_t last = (end + kLanes - 1) / kLanes;
    const bool whole = keys.tile + first * kLanes >= block.inner_begin &&
                       keys.tile + last * kLanes <= block.inner_end;
    const bool predicate = keys.tile + end > block.predicate_begin;
    const bool capped = params_.logit_cap > 0;
    if (whole && !predicate && !keys.scales && !capped && !params_.alibi_slopes) return;
    if (params_.alibi_slopes) load_key_positions(keys);
    for (int32_t r = 0; r < block.rows; ++r, scores += kTileKeys) {
      const RowBounds& row = bounds_[block.first + r];
      if (keys.scales) scale_scores(keys.scales, first, last, scores);
      if (capped) cap_scores(keys.factor, params_.logit_cap, first, last, scores);
      if (params_.alibi_slopes) {
        add_alibi(alibi_slope(keys.head, block.first + r), key_positions_, row.position,
                  capped ? 1.0f : keys.factor, first, last, scores);
      }
      if (!whole) hide_outside(row, keys.tile, first, last, scores);
      if (predicate) ask_each(block.first + r, keys.tile, begin, end, scores);
    }
  }

 private:
  void load_key_positions(const KeysOfHead& keys) {
    for (int32_t n = keys.begin; n < keys.end; ++n) {
      key_positions_[n] = static_cast<float>(key_position(mask_, keys.tile + n));
    }
  }

  // Of a row, in units of log2.
  float alibi_slope(int64_t head, int32_t r) const {
    return params_.alibi_slopes[head * group_ + (item_.row_begin + r) % group_] * kLog2E;
  }

  void ask_each(int32_t r, int32_t tile, int32_t begin, int32_t end, float* scores) const {
    const int32_t token = (item_.row_begin + r) / group_;
    for (int32_t n = larger(begin, bounds_[r].predicate_begin - tile); n < end; ++n) {
      if (!key_visible(mask_, tile + n, token)) scores[n] = -kInfinity;
    }
  }

  const AttentionParams& params_;
  const AttentionItem& item_;
  const MaskView& mask_;
  const RowBounds* bounds_;
  const int32_t group_;
  alignas(64) float key_positions_[kTileKeys];
};

}  // namespace
}  // namespace fovea::kernels::cpu::FOVEA_ISA
