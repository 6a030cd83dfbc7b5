// SPDX-License-Identifier: Apache-2.0
// The state that the classes which compute an item share.
#pragma once

#include "kernels/cpu/simd/attention/modes.h"
#include "kernels/cpu/simd/attention/page_pairs.h"
#include "kernels/cpu/simd/attention/prefetch.h"

namespace fovea::kernels::cpu::FOVEA_ISA {
namespace {

// The distance of the only prefetch stream: a third of the first-level cache of today's cores. With
// two streams the one into the first level runs half as far ahead of the products; the other one
// at twice this distance was slower (2026-11-23: 5 % of f32 decode).
constexpr int64_t kPrefetchBytes = 16 << 10;

// The item, how it is computed, and where the work stands.
struct ItemContext {
  ItemContext(const AttentionCall& call, const AttentionItem& item, const AttentionScratch& memory)
      : params(*call.params),
        work(item),
        scratch(memory),
        shape(params, item),
        reader(params, item.request),
        modes(params, reader, shape),
        l1_stream(reader, item.head_begin, item.head_end, modes.group_keys),
        l2_stream(reader, item.head_begin, item.head_end, modes.group_keys),
        pairs(reader, item.head_begin, item.head_end) {
    const bool two_streams = modes.keys == KeySource::cache;
    const int64_t l1_bytes = two_streams ? kPrefetchBytes / 2 : kPrefetchBytes;
    l1_rows = static_cast<int32_t>(l1_bytes / reader.k_row_bytes);
    l2_rows = static_cast<int32_t>(kPrefetchBytes / reader.k_row_bytes);
    const int32_t products = modes.rows == RowMode::lane_blocks
                                 ? (kTileKeys + shape.o_stride) / kLaneKeys
                                 : kTileKeys / kPanelKeys + 1;
    const auto lines = static_cast<int32_t>((reader.k_row_bytes + reader.v_row_bytes) / 64);
    lines_per_product = kTileKeys * lines / (products * blocks()) + 1;
  }

  int32_t blocks() const { return (shape.rows + modes.block_rows - 1) / modes.block_rows; }
  int32_t state_row(const RowBlock& block) const { return head * shape.head_rows + block.first; }
  int64_t kv_head() const { return work.head_begin + head; }

  const float* queries(const RowBlock& block) const {
    return scratch.q + static_cast<int64_t>(state_row(block)) * padded(shape.dim);
  }
  float* o(const RowBlock& block) const {
    return scratch.states[0].o + static_cast<int64_t>(state_row(block)) * shape.o_stride;
  }
  // With all_heads the scores of a head are kept until the other heads have met the keys.
  float* scores(const RowBlock& block) const {
    const bool kept = modes.rows == RowMode::all_heads;
    return scratch.scores + (kept ? state_row(block) * kTileKeys : 0);
  }
  RowPointers row_pointers(const char* const* rows, int64_t offset, bool prefetches) {
    return prefetches ? RowPointers{rows, offset, &l1_stream, &l2_stream}
                      : RowPointers{rows, offset, nullptr, nullptr};
  }
  int64_t row_floats() const { return padded(shape.dim) + kPadFloats; }  // stride of scratch.k_rows

  const AttentionParams& params;
  const AttentionItem& work;
  const AttentionScratch& scratch;
  const ItemShape shape;
  const KeyReader reader;
  const ItemModes modes;

  // Prefetches into the first and the second level of caches. With modes.page_pairs, `pairs`
  // prefetches instead. Many rows use l2_stream alone, a few lines with each product.
  PrefetchStream l1_stream, l2_stream;
  PagePairs pairs;
  int32_t l1_rows, l2_rows;   // distances of the streams
  int32_t lines_per_product;  // with row_blocks and lane_blocks

  TileKeys tile, next_tile;
  int32_t head = 0;  // the kv head at work, counted from work.head_begin
};

}  // namespace
}  // namespace fovea::kernels::cpu::FOVEA_ISA
