// SPDX-License-Identifier: Apache-2.0
// What the parts of an item's work share.
#pragma once

#include "kernels/cpu/simd/attention_adjust.h"
#include "kernels/cpu/simd/attention_paths.h"
#include "kernels/cpu/simd/attention_products.h"
#include "kernels/cpu/simd/attention_rows.h"
#include "kernels/cpu/simd/fp8.h"

namespace fovea::kernels::cpu::FOVEA_ISA {
namespace {

// What is asked for ahead: a third of the first cache of today's cores. Of two streams the first
// one, into the first cache, runs half as far. The second one at twice this distance instead made
// decode of f32 take 5 % longer (Zen 5, 2026-11-23).
constexpr int64_t kBytesAhead = 16 << 10;

struct Range {
  int32_t begin, end;
};

// The item, how it is read, and the tile and head at work.
struct ItemView {
  ItemView(const AttentionCall& call, const AttentionItem& work, const AttentionScratch& memory)
      : params(*call.params),
        item(work),
        scratch(memory),
        shape(params, item),
        reader(params, item.request),
        paths(params, reader, shape),
        near(reader, item.head_begin, item.head_end, paths.group_keys),
        far(reader, item.head_begin, item.head_end, paths.group_keys),
        pairs(reader, item.head_begin, item.head_end) {
    const int32_t products =
        paths.wide ? (kTileKeys + shape.o_stride) / kWideKeys : kTileKeys / kPanelKeys + 1;
    const auto lines = static_cast<int32_t>((reader.k_row_bytes + reader.v_row_bytes) / 64);
    const bool two_streams = paths.keys_in_place && !is_fp8(reader.k_dtype);
    const int64_t bytes_near = two_streams ? kBytesAhead / 2 : kBytesAhead;
    rows_near = static_cast<int32_t>(bytes_near / reader.k_row_bytes);
    rows_far = static_cast<int32_t>(kBytesAhead / reader.k_row_bytes);
    lines_per_ask = kTileKeys * lines / (products * blocks()) + 1;
  }

  // Of rows.
  int32_t blocks() const { return (shape.rows + paths.block_rows - 1) / paths.block_rows; }
  int32_t place(const RowBlock& block) const { return head * shape.head_rows + block.first; }
  int64_t this_head() const { return item.head_begin + head; }
  // Those of few rows wait for the other heads.
  float* scores(const RowBlock& block) const {
    return scratch.scores + (paths.few_rows ? place(block) * kTileKeys : 0);
  }
  SingleRows single_rows(const char* const* rows, int64_t offset, bool asks) {
    return asks ? SingleRows{rows, offset, &near, &far}
                : SingleRows{rows, offset, nullptr, nullptr};
  }
  int64_t row_floats() const { return padded(shape.dim) + kPadFloats; }  // of scratch.k_rows

  const AttentionParams& params;
  const AttentionItem& item;
  const AttentionScratch& scratch;
  const RowShape shape;
  const KeyReader reader;
  const ItemPaths paths;
  // Of what is read later: either `pairs`, which are of this group too, or `near` and, of few rows,
  // `far`.
  LinesAhead near, far;
  PagePairs pairs;
  int32_t rows_near, rows_far, lines_per_ask;

  TileKeys here, later;  // the tile at work and the next one
  int32_t head = 0;
};

}  // namespace
}  // namespace fovea::kernels::cpu::FOVEA_ISA
