// SPDX-License-Identifier: Apache-2.0
// Scores of an item's rows with the keys of a tile.
#pragma once

#include "kernels/cpu/simd/attention/item_context.h"
#include "kernels/cpu/simd/attention/lane_blocks.h"
#include "kernels/cpu/simd/attention/score_kernels.h"

namespace fovea::kernels::cpu::FOVEA_ISA {
namespace {

class TileScores {
 public:
  explicit TileScores(ItemContext& item)
      : item_(item), panel_floats_(static_cast<int64_t>(padded(item.shape.dim)) * kPanelKeys) {
    for (int32_t n = 0; n < kTileKeys; ++n) {
      bf16_rows_[n] = reinterpret_cast<const char*>(bf16_copy() + n * item.shape.dim);
    }
  }

  // Prepares for `keys` of the tile, for the head at work.
  void start(Range keys) {
    packed_panels_ = 0;
    if (item_.modes.keys == KeySource::bf16_copy) {
      unpack_fp8(item_.reader.k_dtype, {item_.tile.k, item_.kv_head() * item_.reader.k_head_bytes},
                 keys.begin, keys.end, item_.shape.dim, bf16_copy());
    }
  }

  // Computes the scores of a row block with `keys`, which are among the keys of start().
  void multiply(const RowBlock& block, Range keys) {
    if (keys.begin >= keys.end) return;
    const float* q = item_.queries(block);
    const int32_t dim = panel_dim();
    for (int32_t p = keys.begin / kPanelKeys; p * kPanelKeys < keys.end; ++p) {
      const Range fused = fused_keys(p, keys);
      if (fused.begin < fused.end) {
        multiply_unpacked(block, p, fused);
        continue;
      }
      // One block uses a panel once, so all panels share one place in the first-level cache.
      float* panel = item_.scratch.k_tile + (item_.modes.one_block ? 0 : p * panel_floats_);
      if (!(packed_panels_ >> p & 1)) {
        pack_panel(p, KeyPanel<false>{panel, dim});
        packed_panels_ |= 1u << p;
      }
      if (!item_.modes.one_block) item_.l2_stream.prefetch<2>(item_.lines_per_product);
      const ScoreProduct product = {q, panel, dim, item_.scores(block) + p * kPanelKeys};
      with_product_rows(product_rows(block.rows), product);
    }
  }

  // Computes the scores of a lane block with `keys`.
  void multiply_lane_block(const RowBlock& block, Range keys, float* scores) {
    const int32_t vectors = lane_vectors(block.rows);
    const int32_t first = keys.begin / kLaneKeys * kLaneKeys;
    for (int32_t p = keys.begin / kPanelKeys; p * kPanelKeys < keys.end; ++p) {
      if (packed_panels_ >> p & 1) continue;
      pack_panel(p, KeyPanel<true>{key_group(p * kPanelKeys), panel_dim()});
      packed_panels_ |= 1u << p;
    }
    LaneProduct product;
    product.rows = item_.queries(block);
    product.factors = key_group(first);
    product.steps = product.group_steps = panel_dim();
    product.groups = (keys.end - first + kLaneKeys - 1) / kLaneKeys;
    product.decay = nullptr;
    product.x = scores + first * vectors * kLanes;
    product.stream = &item_.l2_stream;
    product.lines = item_.lines_per_product;
    with_lane_vectors(vectors, product);
  }

 private:
  // Returns the keys of panel p around `keys` that can be multiplied as they are transposed, or an
  // empty range.
  Range fused_keys(int32_t p, Range keys) const {
    Range fused = {p * kPanelKeys, (p + 1) * kPanelKeys};
    if (item_.reader.k_dtype == DType::f32) {
      const Range vectors = whole_vectors(keys);
      fused.begin = larger(fused.begin, vectors.begin);
      fused.end = smaller(fused.end, vectors.end);
    }
    const bool fits =
        item_.modes.fused_keys && fused.begin >= item_.tile.begin && fused.end <= item_.tile.end;
    return fits ? fused : Range{0, 0};
  }

  void multiply_unpacked(const RowBlock& block, int32_t p, Range keys) {
    if (item_.modes.page_pairs) {
      return item_.pairs.with_pair(
          [&](const auto& rows) { multiply_fused<Bf16>(block, p, keys, rows); });
    }
    const RowPointers rows = panel_rows(p * kPanelKeys);
    if (item_.modes.keys == KeySource::cache_bytes) {
      multiply_fused<Fp8ByTable>(block, p, keys, rows);
    } else if (item_.reader.k_dtype == DType::f32) {
      multiply_fused<float>(block, p, keys, rows);
    } else {
      multiply_fused<Bf16>(block, p, keys, rows);
    }
  }

  template <class T, class Rows>
  void multiply_fused([[maybe_unused]] const RowBlock& block, [[maybe_unused]] int32_t p,
                      [[maybe_unused]] Range keys, [[maybe_unused]] const Rows& rows) {
#if HWY_TARGET == HWY_AVX3
    FusedScoreProduct<T, Rows> product;
    product.q = item_.queries(block);
    product.keys = rows;
    product.dim = item_.shape.dim;
    product.begin = keys.begin - p * kPanelKeys;
    product.end = keys.end - p * kPanelKeys;
    product.scores = item_.scores(block) + p * kPanelKeys;
    product.fp8_bytes =
        item_.modes.keys == KeySource::cache_bytes ? &fp8_bytes(item_.reader.k_dtype) : nullptr;
    with_product_rows(product_rows(block.rows), product);
#endif
  }

  RowPointers panel_rows(int32_t first) const {
    const bool copied = item_.modes.keys == KeySource::bf16_copy;
    return item_.row_pointers((copied ? bf16_rows_ : item_.tile.k) + first,
                              copied ? 0 : item_.kv_head() * item_.reader.k_head_bytes,
                              item_.modes.one_block);
  }

  template <bool kGroups>
  void pack_panel(int32_t p, const KeyPanel<kGroups>& panel) {
    const int32_t first = p * kPanelKeys;
    if (item_.modes.keys != KeySource::f32_copy && first >= item_.tile.begin &&
        first + kPanelKeys <= item_.tile.end) {
      return pack_from_rows(first, panel);
    }
    // With ValueSource::key_copy all rows of the tile are kept: their fronts are the values.
    const bool kept = item_.modes.values == ValueSource::key_copy;
    float* rows = item_.scratch.k_rows + (kept ? first * item_.row_floats() : 0);
    const auto row_lines = static_cast<int32_t>((item_.reader.k_row_bytes + 63) / 64);
    for (int32_t n = 0; n < kPanelKeys; ++n) {
      if (item_.modes.one_block) item_.l1_stream.prefetch<3>(row_lines);
      float* to = rows + n * item_.row_floats();
      if (first + n < item_.tile.begin || first + n >= item_.tile.end) {
        for (int32_t d = 0; d < padded(item_.shape.dim); d += kLanes) store(hn::Zero(kF32), to + d);
        continue;
      }
      const char* from = item_.tile.k[first + n] + item_.kv_head() * item_.reader.k_head_bytes;
      if (item_.reader.fp8_rows) {
        load_mla_fp8_row(from, to);
      } else {
        load_any_row(from, item_.reader.k_dtype, item_.shape.dim, to);
      }
    }
    transpose_panel(rows, item_.row_floats(), panel);
  }

  template <bool kGroups>
  void pack_from_rows(int32_t first, const KeyPanel<kGroups>& panel) {
    const RowPointers keys = panel_rows(first);
    if (item_.reader.k_dtype == DType::f32) {
      transpose_from_rows(static_cast<const float*>(nullptr), keys, panel);
    } else {
      transpose_from_rows(static_cast<const Bf16*>(nullptr), keys, panel);
    }
  }

  int32_t panel_dim() const { return (item_.shape.dim + 3) / 4 * 4; }

  // Returns the transposed keys [n, n + kLaneKeys): [dim, kLaneKeys].
  float* key_group(int32_t n) const {
    return item_.scratch.k_tile + static_cast<int64_t>(n) * panel_dim();
  }

  Bf16* bf16_copy() const { return static_cast<Bf16*>(item_.scratch.k_unpacked); }

  ItemContext& item_;
  const int64_t panel_floats_;
  uint32_t packed_panels_ = 0;        // bit p: panel p is in the scratch
  const char* bf16_rows_[kTileKeys];  // the rows of bf16_copy()
};

}  // namespace
}  // namespace fovea::kernels::cpu::FOVEA_ISA
