// SPDX-License-Identifier: Apache-2.0
// The shape of an item, and the one place that decides how its rows, keys and values are handled.
#pragma once

#include "kernels/cpu/simd/attention/blocks.h"
#include "kernels/cpu/simd/attention/fp8.h"
#include "kernels/cpu/simd/attention/keys.h"
#include "kernels/cpu/simd/attention/page_pairs.h"

namespace fovea::kernels::cpu::FOVEA_ISA {
namespace {

// State arrays hold the rows of head after head. Each head takes head_rows of them: whole blocks,
// the last one rounded up to a size that the products have. An index into these arrays is a state
// row.
struct ItemShape {
  ItemShape(const AttentionParams& params, const AttentionItem& work)
      : group(params.q_heads / params.kv_heads),
        heads(work.head_end - work.head_begin),
        rows(work.row_end - work.row_begin),
        head_rows(rows / kProductRows * kProductRows + product_rows(rows % kProductRows)),
        dim(params.head_dim),
        dim_v(params.head_dim_v),
        o_stride(padded(params.head_dim_v)) {}

  int32_t state_rows() const { return heads * head_rows; }

  int32_t group;  // q heads of a kv head
  int32_t heads;  // kv heads
  int32_t rows;   // rows per kv head
  int32_t head_rows;
  int32_t dim, dim_v;
  int32_t o_stride;
};

// How the rows of an item meet the keys of a tile.
enum class RowMode : uint8_t {
  // Decode: at most kBlockRows rows of each head. All heads meet a group of keys, then the next
  // group; the values follow in the same order. So pages are read from front to back.
  all_heads,
  // Prefill: many rows of one head, in blocks of kProductRows. Each block in turn meets the keys
  // and the values of the tile.
  row_blocks,
  // The same in blocks of kLaneRows, whose rows lie in the lanes of vectors (lane_blocks.h).
  lane_blocks,
};

// Where the score products read the rows of keys.
enum class KeySource : uint8_t {
  f32_copy,     // in the scratch, converted row by row: any type, layout and head dim
  bf16_copy,    // in the scratch, converted from fp8
  cache,        // in the cache: f32 or bf16
  cache_bytes,  // in the cache: fp8, converted inside the products by a byte lookup
};

// Where the products of weights read the values.
enum class ValueSource : uint8_t {
  f32_copy,     // in the scratch, in strips or column groups: dense, for rows that read them often
  key_copy,     // the f32 copies of the K rows, whose front they are
  bf16_copy,    // in the scratch, converted from fp8
  cache,        // in the cache: f32, bf16 or f16
  cache_bytes,  // in the cache: fp8, converted inside the products by a byte lookup
};

struct ItemModes {
  ItemModes(const AttentionParams& params, const KeyReader& reader, const ItemShape& shape) {
    one_block = shape.rows <= kProductRows;
    const bool few_rows = shape.rows <= kFusedRows;
    keys = key_source(reader, shape, few_rows);
    fused_keys = keys != KeySource::f32_copy && few_rows;
    const bool all_heads = shape.head_rows <= kBlockRows;
    values = value_source(reader, shape, all_heads);
    rows = all_heads            ? RowMode::all_heads
           : fits_lanes(params) ? RowMode::lane_blocks
                                : RowMode::row_blocks;
    block_rows = rows == RowMode::lane_blocks ? kLaneRows : kProductRows;
    const bool in_cache = keys == KeySource::cache && values == ValueSource::cache;
    page_pairs = fused_keys && in_cache && PagePairs::serves(reader);
    group_keys = fused_keys && keys == KeySource::cache ? kPanelKeys : kTileKeys;
    value_group_keys = reads_cached_values() ? group_keys : kTileKeys;
  }

  bool reads_cached_values() const {
    return values == ValueSource::cache || values == ValueSource::cache_bytes;
  }

  RowMode rows;
  KeySource keys;
  ValueSource values;
  bool one_block;            // each head has one block of rows, which reads a panel of keys once
  bool fused_keys;           // keys are multiplied as they are transposed, where a panel is whole
  bool page_pairs;           // keys and values are read from two pages at a time
  int32_t block_rows;        // rows of the largest block
  int32_t group_keys;        // keys that all_heads takes before the next head
  int32_t value_group_keys;  // the same for values

 private:
  static KeySource key_source(const KeyReader& reader, const ItemShape& shape, bool few_rows) {
    const int32_t vector_dims = reader.k_dtype == DType::f32 ? kLanes : 2 * kLanes;
    if (reader.fp8_rows || reader.k_dtype == DType::f16 || shape.dim % vector_dims != 0) {
      return KeySource::f32_copy;
    }
    if (!is_fp8(reader.k_dtype)) return KeySource::cache;
    return has_byte_lookup() && few_rows ? KeySource::cache_bytes : KeySource::bf16_copy;
  }

  // A copy pays for many rows, unless values are f32 rows without gaps already.
  ValueSource value_source(const KeyReader& reader, const ItemShape& shape, bool all_heads) const {
    if (reader.v_in_k && keys == KeySource::f32_copy) return ValueSource::key_copy;
    const bool fp8 = is_fp8(reader.v_dtype);
    const bool dense = reader.v_in_k && reader.v_dtype == DType::f32;
    if (!(all_heads || dense) || shape.dim_v % (fp8 ? 2 * kLanes : kLanes) != 0) {
      return ValueSource::f32_copy;
    }
    if (!fp8) return ValueSource::cache;
    return has_byte_lookup() && one_block ? ValueSource::cache_bytes : ValueSource::bf16_copy;
  }

  // With AVX2 lane blocks are slower (2026-11-23: 5 % at head_dim 128).
  bool fits_lanes(const AttentionParams& params) const {
    return kLanes == 16 && values == ValueSource::f32_copy && only_intervals(params.mask) &&
           params.logit_cap <= 0 && !params.alibi_slopes;
  }
};

}  // namespace
}  // namespace fovea::kernels::cpu::FOVEA_ISA
