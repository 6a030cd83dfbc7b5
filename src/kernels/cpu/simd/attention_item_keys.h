// SPDX-License-Identifier: Apache-2.0
// Products of an item's queries with the keys of a tile.
#pragma once

#include "kernels/cpu/simd/attention_item.h"

namespace fovea::kernels::cpu::FOVEA_ISA {
namespace {

class KeyProducts {
 public:
  explicit KeyProducts(ItemView& view)
      : view_(view), panel_floats_(static_cast<int64_t>(padded(view.shape.dim)) * kPanelKeys) {
    for (int32_t n = 0; n < kTileKeys; ++n) {
      k_unpacked_[n] = reinterpret_cast<const char*>(k_bf16() + n * view.shape.dim);
    }
  }

  // Keys [begin, end) of the tile, of the head at work, come next.
  void start(int32_t begin, int32_t end) {
    packed_panels_ = 0;
    if (view_.paths.unpacks_keys) {
      unpack_fp8(view_.reader.k_dtype, view_.here.k, view_.this_head() * view_.reader.k_head_bytes,
                 begin, end, view_.shape.dim, k_bf16());
    }
  }

  // Scores of the block's rows with keys [begin, end), which are among those.
  void multiply(const RowBlock& block, int32_t begin, int32_t end) {
    if (begin >= end) return;
    const float* q =
        view_.scratch.q + static_cast<int64_t>(view_.place(block)) * padded(view_.shape.dim);
    const int32_t dim = panel_dim();
    for (int32_t p = begin / kPanelKeys; p * kPanelKeys < end; ++p) {
      const Range direct = direct_keys(p, begin, end);
      if (direct.begin < direct.end) {
        score_from_cache(block, p, direct);
        continue;
      }
      // With one block of rows a panel is used once, and its place stays in the first cache.
      float* panel = view_.scratch.k_tile + (view_.paths.one_block ? 0 : p * panel_floats_);
      if (!(packed_panels_ >> p & 1)) {
        pack_panel(p, KeyPanel<false>{panel, dim});
        packed_panels_ |= 1u << p;
      }
      if (!view_.paths.one_block) view_.near.ask<2>(view_.lines_per_ask);
      const ScoreProduct product = {q, panel, dim, view_.scores(block) + p * kPanelKeys};
      with_product_rows(product_rows(block.rows), product);
    }
  }

  // The same for a block of attention_wide.h.
  void multiply_wide(const RowBlock& block, int32_t begin, int32_t end, float* scores) {
    const int32_t vectors = wide_vectors(block.rows);
    const int32_t first = begin / kWideKeys * kWideKeys;
    for (int32_t p = begin / kPanelKeys; p * kPanelKeys < end; ++p) {
      if (packed_panels_ >> p & 1) continue;
      pack_panel(p, KeyPanel<true>{group_of_keys(p * kPanelKeys), panel_dim()});
      packed_panels_ |= 1u << p;
    }
    WideProduct product;
    product.rows =
        view_.scratch.q + static_cast<int64_t>(view_.place(block)) * padded(view_.shape.dim);
    product.factors = group_of_keys(first);
    product.steps = product.group_steps = panel_dim();
    product.groups = (end - first + kWideKeys - 1) / kWideKeys;
    product.decay = nullptr;
    product.x = scores + first * vectors * kLanes;
    product.ahead = &view_.near;
    product.lines = view_.lines_per_ask;
    with_wide_vectors(vectors, product);
  }

 private:
  // The keys of a panel around [begin, end) that can be multiplied as they lie, or none.
  Range direct_keys(int32_t p, int32_t begin, int32_t end) const {
    Range keys = {p * kPanelKeys, (p + 1) * kPanelKeys};
    if (view_.reader.k_dtype == DType::f32) {
      keys.begin = larger(keys.begin, begin / kLanes * kLanes);
      keys.end = smaller(keys.end, (end + kLanes - 1) / kLanes * kLanes);
    }
    const bool direct =
        view_.paths.direct && keys.begin >= view_.here.begin && keys.end <= view_.here.end;
    return direct ? keys : Range{0, 0};
  }

  Bf16* k_bf16() const { return static_cast<Bf16*>(view_.scratch.k_unpacked); }

  void score_from_cache(const RowBlock& block, int32_t p, Range range) {
    if (view_.paths.by_pairs) {
      return view_.pairs.with_pair(
          [&](const auto& rows) { score_directly<Bf16>(block, p, range, rows); });
    }
    const SingleRows rows = panel_rows(p * kPanelKeys);
    if (view_.paths.looks_up_keys) {
      score_directly<Fp8ByTable>(block, p, range, rows);
    } else if (view_.reader.k_dtype == DType::f32) {
      score_directly<float>(block, p, range, rows);
    } else {
      score_directly<Bf16>(block, p, range, rows);
    }
  }

  template <class T, class Rows>
  void score_directly([[maybe_unused]] const RowBlock& block, [[maybe_unused]] int32_t p,
                      [[maybe_unused]] Range range, [[maybe_unused]] const Rows& rows) {
#if HWY_TARGET == HWY_AVX3
    DirectScoreProduct<T, Rows> product;
    product.q =
        view_.scratch.q + static_cast<int64_t>(view_.place(block)) * padded(view_.shape.dim);
    product.keys = rows;
    product.dim = view_.shape.dim;
    product.begin = range.begin - p * kPanelKeys;
    product.end = range.end - p * kPanelKeys;
    product.scores = view_.scores(block) + p * kPanelKeys;
    product.fp8_bytes = view_.paths.looks_up_keys ? &fp8_bytes(view_.reader.k_dtype) : nullptr;
    with_product_rows(product_rows(block.rows), product);
#endif
  }

  SingleRows panel_rows(int32_t first) const {
    const bool unpacked = view_.paths.unpacks_keys;
    return view_.single_rows((unpacked ? k_unpacked_ : view_.here.k) + first,
                             unpacked ? 0 : view_.this_head() * view_.reader.k_head_bytes,
                             view_.paths.one_block);
  }

  template <bool kGroups>
  void pack_panel(int32_t p, const KeyPanel<kGroups>& panel) {
    const int32_t first = p * kPanelKeys;
    if (view_.paths.keys_in_place && first >= view_.here.begin &&
        first + kPanelKeys <= view_.here.end) {
      return pack_from_cache(first, panel);
    }
    float* rows =
        view_.scratch.k_rows + (view_.paths.values_in_k_rows ? first * view_.row_floats() : 0);
    const auto row_lines = static_cast<int32_t>((view_.reader.k_row_bytes + 63) / 64);
    for (int32_t n = 0; n < kPanelKeys; ++n) {
      if (view_.paths.one_block) view_.near.ask<3>(row_lines);
      float* to = rows + n * view_.row_floats();
      if (first + n < view_.here.begin || first + n >= view_.here.end) {
        for (int32_t d = 0; d < padded(view_.shape.dim); d += kLanes) store(hn::Zero(kF32), to + d);
        continue;
      }
      const char* from = view_.here.k[first + n] + view_.this_head() * view_.reader.k_head_bytes;
      if (view_.reader.fp8_rows) {
        load_mla_fp8_row(from, to);
      } else {
        load_any_row(from, view_.reader.k_dtype, view_.shape.dim, to);
      }
    }
    transpose_panel(rows, view_.row_floats(), panel);
  }

  int32_t panel_dim() const { return (view_.shape.dim + 3) / 4 * 4; }

  // Of kWideKeys keys from n on: [dim, kWideKeys].
  float* group_of_keys(int32_t n) const {
    return view_.scratch.k_tile + static_cast<int64_t>(n) * panel_dim();
  }

  template <bool kGroups>
  void pack_from_cache(int32_t first, const KeyPanel<kGroups>& panel) {
    const SingleRows keys = panel_rows(first);
    if (view_.reader.k_dtype == DType::f32) {
      transpose_from_cache(static_cast<const float*>(nullptr), keys, panel);
    } else {
      transpose_from_cache(static_cast<const Bf16*>(nullptr), keys, panel);
    }
  }

  ItemView& view_;
  const int64_t panel_floats_;
  uint32_t packed_panels_ = 0;
  const char* k_unpacked_[kTileKeys];
};

}  // namespace
}  // namespace fovea::kernels::cpu::FOVEA_ISA
