// SPDX-License-Identifier: Apache-2.0
// How an item reads its keys and values: chosen once, by types, widths and the number of rows.
#pragma once

#include "kernels/cpu/simd/attention_rows.h"
#include "kernels/cpu/simd/fp8.h"

namespace fovea::kernels::cpu::FOVEA_ISA {
namespace {

struct ItemPaths {
  ItemPaths(const AttentionParams& params, const KeyReader& reader, const RowShape& shape)
      : one_block(shape.rows <= kProductRows), few_rows(shape.head_rows <= kBlockRows) {
    const bool f32_keys = reader.k_dtype == DType::f32;
    const bool fp8_keys = is_fp8(reader.k_dtype);
    keys_in_place = !reader.fp8_rows && reader.k_dtype != DType::f16 &&
                    shape.dim % (f32_keys ? kLanes : 2 * kLanes) == 0;
    direct = keys_in_place && one_block && shape.rows <= kDirectRows;
    looks_up_keys = fp8_keys && has_look_up() && direct;
    unpacks_keys = fp8_keys && keys_in_place && !looks_up_keys;

    values_in_k_rows = reader.v_in_k && !keys_in_place;
    // Many rows read values often enough to pay for a copy that is f32 and dense.
    const bool dense = reader.v_in_k && reader.v_dtype == DType::f32;
    const bool fp8_values = is_fp8(reader.v_dtype);
    values_in_place = (few_rows || dense) && !values_in_k_rows &&
                      shape.dim_v % (fp8_values ? 2 * kLanes : kLanes) == 0;
    looks_up_values = values_in_place && fp8_values && has_look_up() && one_block;
    unpacks_values = values_in_place && fp8_values && !looks_up_values;

    // With AVX2 5 % slower at head_dim 128 (2026-11-23).
    wide = kLanes == 16 && !few_rows && !values_in_place && !values_in_k_rows &&
           only_intervals(params.mask) && params.logit_cap <= 0 && !params.alibi_slopes;
    block_rows = wide ? kWideRows : kProductRows;

    by_pairs = direct && values_in_place && PagePairs::serves(reader);
    group_keys = kTileKeys;
    if (direct && !fp8_keys) group_keys = kPanelKeys;
  }

  // Values of a group of keys are met before those of the next one.
  bool values_by_group() const { return values_in_place && !unpacks_values; }

  bool one_block;      // of rows in each head
  bool few_rows;       // of each head
  bool keys_in_place;  // transposed straight from the cache
  bool direct;         // and multiplied at once
  bool values_in_place;
  bool values_in_k_rows;                // the unpacked K rows hold the values too
  bool looks_up_keys, looks_up_values;  // fp8 rows are converted in the products
  bool unpacks_keys, unpacks_values;    // fp8 rows become bf16 in the scratch first
  bool wide;                            // blocks of attention_wide.h
  int32_t block_rows;                   // at most
  bool by_pairs;                        // of pages, rows are read and lines asked for
  int32_t group_keys;                   // that few rows meet before those of the next head
};

}  // namespace
}  // namespace fovea::kernels::cpu::FOVEA_ISA
