// SPDX-License-Identifier: Apache-2.0
// Weighted sums of the values of a tile.
#pragma once

#include "kernels/cpu/simd/attention/item_context.h"
#include "kernels/cpu/simd/attention/lane_blocks.h"
#include "kernels/cpu/simd/attention/value_kernels.h"

namespace fovea::kernels::cpu::FOVEA_ISA {
namespace {

class TileValues {
 public:
  explicit TileValues(ItemContext& item) : item_(item) {}

  // Prepares for the values of the head at work.
  void start() { ready_ = false; }

  // Multiplies o of a row block by `decay` and adds the values of `keys`, weighted by the scores.
  void add(const RowBlock& block, const float* decay, Range keys) {
    if (!ready_) prepare();
#if HWY_TARGET == HWY_AVX3
    if (item_.modes.values == ValueSource::cache_bytes) {
      return add_rows<Fp8ByTable>(block, decay, keys, rows());
    }
#endif
    if (item_.modes.page_pairs) {
      return item_.pairs.with_pair(
          [&](const auto& rows) { add_rows<Bf16>(block, decay, keys, rows); });
    }
    const ValueSource source = item_.modes.values;
    const DType dtype = item_.reader.v_dtype;
    if (source == ValueSource::bf16_copy ||
        (source == ValueSource::cache && dtype == DType::bf16)) {
      add_rows<Bf16>(block, decay, keys, rows());
    } else if (source == ValueSource::cache && dtype == DType::f16) {
      add_rows<F16>(block, decay, keys, rows());
    } else if (source == ValueSource::cache || source == ValueSource::key_copy) {
      add_rows<float>(block, decay, keys, rows());
    } else {
      add_strips(block, decay, keys);
    }
  }

  // Does the same for a lane block. If `decay` is null, o starts at 0.
  void add_lane_block(const RowBlock& block, const float* weights, const float* decay, Range keys) {
    if (!ready_) prepare();
    const int32_t vectors = lane_vectors(block.rows);
    LaneProduct product;
    product.rows = weights + keys.begin * vectors * kLanes;
    product.factors = item_.scratch.v_strips + keys.begin * kLaneKeys;
    product.steps = keys.end - keys.begin;
    product.groups = item_.shape.o_stride / kLaneKeys;
    product.group_steps = kTileKeys;
    product.decay = decay;
    product.x = item_.o(block);
    product.stream = &item_.l2_stream;
    product.lines = item_.lines_per_product;
    with_lane_vectors(vectors, product);
  }

 private:
  // Makes the values of the tile readable as ItemModes::values says.
  void prepare() {
    ready_ = true;
    const TileKeys& tile = item_.tile;
    switch (item_.modes.values) {
      case ValueSource::cache:
      case ValueSource::cache_bytes:
        return;
      case ValueSource::key_copy:
        for (int32_t n = tile.begin; n < tile.end; ++n) {
          copied_rows_[n] =
              reinterpret_cast<const char*>(item_.scratch.k_rows + n * item_.row_floats());
        }
        return;
      case ValueSource::bf16_copy:
        unpack_fp8(item_.reader.v_dtype, {tile.v, head_offset()}, tile.begin, tile.end,
                   item_.shape.dim_v, bf16_copy());
        for (int32_t n = tile.begin; n < tile.end; ++n) {
          copied_rows_[n] = reinterpret_cast<const char*>(bf16_copy() + n * item_.shape.dim_v);
        }
        return;
      case ValueSource::f32_copy:
        for (int32_t n = tile.begin; n < tile.end; ++n) copy_row(n, tile.v[n] + head_offset());
        return;
    }
  }

  void copy_row(int32_t n, const char* from) {
    with_type(from, item_.reader.v_dtype, [&](const auto* typed) {
      if (item_.modes.rows == RowMode::lane_blocks) {
        load_into_column_groups(typed, item_.shape.dim_v, n, item_.scratch.v_strips);
      } else {
        load_into_strips(typed, item_.shape.dim_v, n, item_.scratch.v_strips);
      }
    });
  }

  void add_strips(const RowBlock& block, const float* decay, Range keys) {
    StripsProduct product;
    product.weights = item_.scores(block);
    product.strips = item_.scratch.v_strips;
    product.decay = decay;
    product.begin = keys.begin;
    product.end = keys.end;
    product.columns = padded(item_.shape.dim_v);
    product.o = item_.o(block);
    product.o_stride = item_.shape.o_stride;
    if (!item_.modes.one_block) item_.l2_stream.prefetch<2>(item_.lines_per_product);
    with_product_rows(product_rows(block.rows), product);
  }

  template <class T, class Rows>
  HWY_INLINE void add_rows(const RowBlock& block, const float* decay, Range keys,
                           const Rows& rows) {
    ValueProduct<T, Rows> product;
    product.weights = item_.scores(block);
    product.values = rows;
    product.decay = decay;
    product.begin = keys.begin;
    product.end = keys.end;
    product.width = (item_.shape.dim_v + kLanes - 1) / kLanes * kLanes;
    product.o = item_.o(block);
    product.o_stride = item_.shape.o_stride;
    product.fp8_bytes =
        item_.modes.values == ValueSource::cache_bytes ? &fp8_bytes(item_.reader.v_dtype) : nullptr;
    with_product_rows(product_rows(block.rows), product);
  }

  // Returns the rows of values in the cache or in a copy. Values that lie in the keys' rows were
  // prefetched with the keys.
  RowPointers rows() {
    const bool cached = item_.modes.reads_cached_values();
    return item_.row_pointers(cached ? item_.tile.v : copied_rows_, cached ? head_offset() : 0,
                              item_.modes.one_block && item_.reader.v_row_bytes > 0);
  }

  int64_t head_offset() const { return item_.kv_head() * item_.reader.v_head_bytes; }
  Bf16* bf16_copy() const { return static_cast<Bf16*>(item_.scratch.v_unpacked); }

  ItemContext& item_;
  bool ready_ = false;
  const char* copied_rows_[kTileKeys];
};

}  // namespace
}  // namespace fovea::kernels::cpu::FOVEA_ISA
