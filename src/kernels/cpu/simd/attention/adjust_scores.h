// SPDX-License-Identifier: Apache-2.0
// From products to scores in row blocks: scales of keys, soft cap, ALiBi and masks.
#pragma once

#include "kernels/cpu/simd/attention/blocks.h"
#include "kernels/cpu/simd/attention/keys.h"
#include "kernels/cpu/simd/exponentials.h"

namespace fovea::kernels::cpu::FOVEA_ISA {
namespace {

// The functions up to ScoreAdjuster change the elements [lanes.begin, lanes.end) of one row of
// scores, whole vectors. `factor` brings products to units of log2; cap_scores() and add_alibi()
// apply it.

inline void scale_scores(const float* key_scales, Range lanes, float* scores) {
  for (int32_t v = lanes.begin; v < lanes.end; v += kLanes) {
    store(hn::Mul(load(scores + v), load(key_scales + v)), scores + v);
  }
}

inline void cap_scores(float factor, float cap, Range lanes, float* scores) {
  const F32 inner = hn::Set(kF32, factor * kLn2 / cap);
  const F32 outer = hn::Set(kF32, kLog2E * cap);
  for (int32_t v = lanes.begin; v < lanes.end; v += kLanes) {
    store(hn::Mul(tanh_of(hn::Mul(load(scores + v), inner)), outer), scores + v);
  }
}

// The bias of one row: its slope in units of log2, its position and those of the keys.
struct AlibiRow {
  float slope;
  int32_t position;
  const float* key_positions;
};

inline void add_alibi(const AlibiRow& row, float factor, Range lanes, float* scores) {
  const F32 slopes = hn::Set(kF32, row.slope);
  const F32 factors = hn::Set(kF32, factor);
  const F32 from = hn::Set(kF32, static_cast<float>(row.position));
  for (int32_t v = lanes.begin; v < lanes.end; v += kLanes) {
    const F32 distance = hn::Sub(load(row.key_positions + v), from);
    store(hn::MulAdd(slopes, distance, hn::Mul(load(scores + v), factors)), scores + v);
  }
}

// Hides the keys that lie outside the row's bounds. `tile_begin` is the tile's first key.
inline void hide_outside(const RowBounds& row, int32_t tile_begin, Range lanes, float* scores) {
  const hn::Rebind<int32_t, F32Tag> d32;
  const auto before = hn::Set(d32, row.begin - 1);
  const auto end = hn::Set(d32, row.end);
  const auto before_prefix = hn::Set(d32, row.prefix_begin - 1);
  const auto prefix_end = hn::Set(d32, row.prefix_end);
  for (int32_t v = lanes.begin; v < lanes.end; v += kLanes) {
    const auto key = hn::Iota(d32, tile_begin + v);
    const auto inside = hn::And(hn::Gt(key, before), hn::Lt(key, end));
    const auto in_prefix = hn::And(hn::Gt(key, before_prefix), hn::Lt(key, prefix_end));
    const auto seen = hn::RebindMask(kF32, hn::Or(inside, in_prefix));
    store(hn::IfThenElse(seen, load(scores + v), hn::Set(kF32, -kInfinity)), scores + v);
  }
}

// One tile as the rows of one kv head meet it.
struct HeadTile {
  int32_t tile_begin;  // first key of the tile
  Range keys;          // the item's keys, counted from tile_begin
  int64_t kv_head;
  float factor;         // brings products to units of log2
  const float* scales;  // [kTileKeys], or null
};

// Turns products into masked scores. Its arguments must outlive it.
class ScoreAdjuster {
 public:
  // `bounds` holds all rows of a head; `group` is the number of q heads of a kv head.
  ScoreAdjuster(const AttentionParams& params, const AttentionItem& work, const MaskView& mask,
                const RowBounds* bounds, int32_t group)
      : params_(params), work_(work), mask_(mask), bounds_(bounds), group_(group) {}

  // Changes `scores` [rows of the block, kTileKeys] from products into scores, for whole vectors
  // around `keys`. Scores are still to be multiplied by tile.factor, unless has_log2_scores().
  void adjust(const RowBlock& block, const HeadTile& tile, Range keys, float* scores) {
    const Range lanes = whole_vectors(keys);
    const bool inside = tile.tile_begin + lanes.begin >= block.inner.begin &&
                        tile.tile_begin + lanes.end <= block.inner.end;
    const bool predicate = tile.tile_begin + keys.end > block.predicate_begin;
    const bool capped = params_.logit_cap > 0;
    if (inside && !predicate && !tile.scales && !has_log2_scores()) return;
    if (params_.alibi_slopes) load_key_positions(tile);
    for (int32_t r = 0; r < block.rows; ++r, scores += kTileKeys) {
      const RowBounds& row = bounds_[block.first + r];
      if (tile.scales) scale_scores(tile.scales, lanes, scores);
      if (capped) cap_scores(tile.factor, params_.logit_cap, lanes, scores);
      if (params_.alibi_slopes) {
        const AlibiRow alibi = {alibi_slope(tile.kv_head, block.first + r), row.position,
                                key_positions_};
        add_alibi(alibi, capped ? 1.0f : tile.factor, lanes, scores);
      }
      if (!inside) hide_outside(row, tile.tile_begin, lanes, scores);
      if (predicate) apply_predicate(block.first + r, tile.tile_begin, keys, scores);
    }
  }

  // A cap or ALiBi leaves scores in units of log2.
  bool has_log2_scores() const { return params_.logit_cap > 0 || params_.alibi_slopes; }

 private:
  void load_key_positions(const HeadTile& tile) {
    for (int32_t n = tile.keys.begin; n < tile.keys.end; ++n) {
      key_positions_[n] = static_cast<float>(key_position(mask_, tile.tile_begin + n));
    }
  }

  // Returns the slope of row r in units of log2.
  float alibi_slope(int64_t kv_head, int32_t r) const {
    return params_.alibi_slopes[kv_head * group_ + (work_.row_begin + r) % group_] * kLog2E;
  }

  // Asks key_visible() about each key from the row's predicate_begin on.
  void apply_predicate(int32_t r, int32_t tile_begin, Range keys, float* scores) const {
    const int32_t token = (work_.row_begin + r) / group_;
    for (int32_t n = larger(keys.begin, bounds_[r].predicate_begin - tile_begin); n < keys.end;
         ++n) {
      if (!key_visible(mask_, tile_begin + n, token)) scores[n] = -kInfinity;
    }
  }

  const AttentionParams& params_;
  const AttentionItem& work_;
  const MaskView& mask_;
  const RowBounds* bounds_;
  const int32_t group_;
  alignas(64) float key_positions_[kTileKeys];
};

}  // namespace
}  // namespace fovea::kernels::cpu::FOVEA_ISA
