// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/attention_layout.h"

#include <algorithm>
#include <bit>

#include "core/rounding.h"
#include "core/workspace_carver.h"

namespace fovea::kernels::cpu {
namespace {

int64_t padded(int32_t dim) { return round_up(dim, kPadFloats); }

// Returns the number of levels of the tree over chunk numbers.
int32_t tree_levels(int32_t max_kv_len) {
  const auto last = static_cast<uint32_t>(std::max(0, max_kv_len - 1)) / kChunkKeys;
  return std::bit_width(last) + 1;
}

AttentionScratch carve_scratch(const AttentionShape& shape, int32_t max_kv_len,
                               WorkspaceCarver& carver) {
  const int64_t rows = round_up(row_capacity(shape), kPadFloats);
  const int64_t dim = padded(shape.head_dim);
  const int64_t dim_v = padded(shape.head_dim_v);
  AttentionScratch scratch;
  scratch.levels = tree_levels(max_kv_len);
  scratch.k_tile = carver.take<float>(kTileKeys * dim);
  scratch.k_rows = carver.take<float>(kTileKeys * (dim + kPadFloats));
  scratch.k_unpacked = carver.take<uint16_t>(kTileKeys * dim);
  scratch.v_unpacked = carver.take<uint16_t>(kTileKeys * dim_v);
  scratch.v_strips = carver.take<float>(kTileKeys * (dim_v + kPadFloats));
  scratch.scores =
      carver.take<float>(std::max(split_row_capacity(shape), kLaneBlockRows) * kTileKeys);
  scratch.scales = carver.take<float>(2 * shape.kv_heads * kTileKeys);
  scratch.q = carver.take<float>(rows * dim);
  scratch.l_lanes = carver.take<float>(rows * kPadFloats);
  scratch.bounds = carver.take<RowBounds>(rows);
  scratch.states = carver.take<RowStates>(scratch.levels + 1);
  for (int32_t level = 0; level <= scratch.levels; ++level) {
    RowStates state;
    state.o = carver.take<float>(rows * dim_v);
    state.m = carver.take<float>(rows);
    state.l = carver.take<float>(rows);
    if (scratch.states) scratch.states[level] = state;
  }
  return scratch;
}

}  // namespace

int32_t padded_rows(int32_t rows) {
  for (const int32_t size : {1, 2, 4, 8}) {
    if (rows <= size) return size;
  }
  return round_up(rows, kBlockRows);
}

// Keeps queries and results of an item in the second-level cache: 576 KiB of them, at most 384
// rows.
int32_t row_capacity(const AttentionShape& shape) {
  constexpr int64_t kFloats = 221184;
  const int64_t rows = kFloats / (padded(shape.head_dim) + padded(shape.head_dim_v));
  return static_cast<int32_t>(std::clamp<int64_t>(rows / kBlockRows, 1, kMaxRows / kBlockRows)) *
         kBlockRows;
}

int32_t split_row_capacity(const AttentionShape& shape) {
  return std::min(row_capacity(shape), 12 * kBlockRows);
}

// The bound of pieces: the planner splits a tile only if it costs more than two quanta of total /
// (threads * kItemsPerThread), and into pieces of at least one quantum plus a rest at each end. So
// there are at most 2 * threads * kItemsPerThread pieces, of a quarter as many tiles.
AttentionLayout::AttentionLayout(const AttentionShape& shape, const AttentionNeed& need) {
  const int64_t group = shape.q_heads / std::max(1, shape.kv_heads);
  const int64_t pieces = 2 * kItemsPerThread * shape.threads;
  const int64_t tiles =
      shape.kv_heads * (need.requests + need.tokens * group / split_row_capacity(shape) + 1);
  items = tiles + pieces;
  merges = std::min(tiles, pieces / 4 + 1);
  partials = pieces * split_row_capacity(shape) * (padded(shape.head_dim_v) + 2);
  WorkspaceCarver carver(nullptr);
  items_at = carver.bytes();
  carver.take<AttentionItem>(items);
  merges_at = carver.bytes();
  carver.take<AttentionMerge>(merges);
  partials_at = carver.bytes();
  carver.take<float>(partials);
  scratch_at = carver.bytes();
  WorkspaceCarver scratch(nullptr);
  carve_scratch(shape, need.max_kv_len, scratch);
  scratch_bytes = scratch.bytes();
  total = scratch_at + scratch_bytes * static_cast<size_t>(shape.threads);
}

AttentionScratch attention_scratch(const AttentionShape& shape, int32_t max_kv_len,
                                   std::byte* memory) {
  WorkspaceCarver carver(memory);
  return carve_scratch(shape, max_kv_len, carver);
}

}  // namespace fovea::kernels::cpu
