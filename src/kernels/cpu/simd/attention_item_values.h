// SPDX-License-Identifier: Apache-2.0
// Weighted sums of the values of a tile.
#pragma once

#include "kernels/cpu/simd/attention_item.h"

namespace fovea::kernels::cpu::FOVEA_ISA {
namespace {

class ValueProducts {
 public:
  explicit ValueProducts(ItemView& view) : view_(view) {}

  // The values of the head at work come next.
  void start() { ready_ = false; }

  // Adds the weighted values of keys [begin, end) of the head at work to o, times decay.
  void add(const RowBlock& block, const float* decay, int32_t begin, int32_t end) {
    if (!ready_) prepare();
#if HWY_TARGET == HWY_AVX3
    if (view_.paths.looks_up_values) {
      return add_values<Fp8ByTable>(block, decay, begin, end, rows());
    }
#endif
    if (view_.paths.by_pairs) {
      return view_.pairs.with_pair(
          [&](const auto& rows) { add_values<Bf16>(block, decay, begin, end, rows); });
    }
    if (view_.paths.unpacks_values ||
        (view_.paths.values_in_place && view_.reader.v_dtype == DType::bf16)) {
      add_values<Bf16>(block, decay, begin, end, rows());
    } else if (view_.paths.values_in_place && view_.reader.v_dtype == DType::f16) {
      add_values<F16>(block, decay, begin, end, rows());
    } else if (view_.paths.values_in_place) {
      add_values<float>(block, decay, begin, end, rows());
    } else if (view_.paths.values_in_k_rows) {
      add_values<float>(block, decay, begin, end, rows());
    } else {
      add_strips(view_.place(block), product_rows(block.rows), view_.scores(block), decay, begin,
                 end);
    }
  }

  // The same for a block of attention_wide.h. Without a decay o starts at 0.
  void add_wide(const RowBlock& block, const float* weights, const float* decay, int32_t begin,
                int32_t end) {
    if (!ready_) prepare();
    const int32_t vectors = wide_vectors(block.rows);
    WideProduct product;
    product.rows = weights + begin * vectors * kLanes;
    product.factors = view_.scratch.v_strips + begin * kWideKeys;
    product.steps = end - begin;
    product.groups = view_.shape.o_stride / kWideKeys;
    product.group_steps = kTileKeys;
    product.decay = decay;
    product.x = view_.scratch.states[0].o + view_.place(block) * int64_t{view_.shape.o_stride};
    product.ahead = &view_.near;
    product.lines = view_.lines_per_ask;
    with_wide_vectors(vectors, product);
  }

 private:
  // Where the values of the tile are read from: the cache, the unpacked K rows, or strips.
  void prepare() {
    ready_ = true;
    if (view_.paths.values_in_place && !view_.paths.unpacks_values) return;
    if (view_.paths.unpacks_values) {
      unpack_fp8(view_.reader.v_dtype, view_.here.v, view_.this_head() * view_.reader.v_head_bytes,
                 view_.here.begin, view_.here.end, view_.shape.dim_v, v_bf16());
      for (int32_t n = view_.here.begin; n < view_.here.end; ++n) {
        values_[n] = reinterpret_cast<const char*>(v_bf16() + n * view_.shape.dim_v);
      }
      return;
    }
    for (int32_t n = view_.here.begin; n < view_.here.end; ++n) {
      if (view_.paths.values_in_k_rows) {
        values_[n] = reinterpret_cast<const char*>(view_.scratch.k_rows + n * view_.row_floats());
      } else {
        const char* from = view_.here.v[n] + view_.this_head() * view_.reader.v_head_bytes;
        with_type(from, view_.reader.v_dtype, [&](const auto* typed) {
          if (view_.paths.wide) {
            load_into_groups(typed, view_.shape.dim_v, n, view_.scratch.v_strips);
          } else {
            load_into_strips(typed, view_.shape.dim_v, n, view_.scratch.v_strips);
          }
        });
      }
    }
  }

  void add_strips(int32_t place, int32_t rows, const float* weights, const float* decay,
                  int32_t begin, int32_t end) {
    StripsProduct product;
    product.weights = weights;
    product.strips = view_.scratch.v_strips;
    product.decay = decay;
    product.begin = begin;
    product.end = end;
    product.columns = padded(view_.shape.dim_v);
    product.o = view_.scratch.states[0].o + static_cast<int64_t>(place) * view_.shape.o_stride;
    product.o_stride = view_.shape.o_stride;
    if (!view_.paths.one_block) view_.near.ask<2>(view_.lines_per_ask);
    with_product_rows(rows, product);
  }

  template <class T, class Rows>
  HWY_INLINE void add_values(const RowBlock& block, const float* decay, int32_t begin, int32_t end,
                             const Rows& rows) {
    ValueProduct<T, Rows> product;
    product.weights = view_.scores(block);
    product.values = rows;
    product.decay = decay;
    product.begin = begin;
    product.end = end;
    product.width = (view_.shape.dim_v + kLanes - 1) / kLanes * kLanes;
    product.o =
        view_.scratch.states[0].o + static_cast<int64_t>(view_.place(block)) * view_.shape.o_stride;
    product.o_stride = view_.shape.o_stride;
    product.fp8_bytes = view_.paths.looks_up_values ? &fp8_bytes(view_.reader.v_dtype) : nullptr;
    with_product_rows(product_rows(block.rows), product);
  }

  // Of the tile. Rows of keys that hold the values too were asked for as keys.
  SingleRows rows() {
    const bool in_place = view_.paths.values_in_place && !view_.paths.unpacks_values;
    return view_.single_rows(in_place ? view_.here.v : values_,
                             in_place ? view_.this_head() * view_.reader.v_head_bytes : 0,
                             view_.paths.one_block && view_.reader.v_row_bytes > 0);
  }

  Bf16* v_bf16() const { return static_cast<Bf16*>(view_.scratch.v_unpacked); }

  ItemView& view_;
  bool ready_ = false;
  const char* values_[kTileKeys];
};

}  // namespace
}  // namespace fovea::kernels::cpu::FOVEA_ISA
