// SPDX-License-Identifier: Apache-2.0
// Cuts a batch into items. The cuts change no bit of the result (see simd/attention/work.h), so
// they depend on the load alone.
#include <algorithm>
#include <span>

#include "core/check.h"
#include "kernels/cpu/attention.h"
#include "kernels/cpu/attention_layout.h"
#include "kernels/cpu/simd/attention/mask.h"

namespace fovea::kernels::cpu {
namespace {

// Contains every key that some row of a tile sees: [begin, end).
struct KeyHull {
  int32_t begin = 0, end = 0;
};

KeyHull visible_keys(const MaskView& mask, int32_t token_begin, int32_t token_end) {
  KeyHull hull = {INT32_MAX, 0};
  for (int32_t token = token_begin; token < token_end; ++token) {
    const RowBounds row = row_bounds(mask, token);
    const bool prefix = row.prefix_end > row.prefix_begin;
    const int32_t begin = prefix ? row.prefix_begin : row.begin;
    const int32_t end = std::max(row.end, prefix ? row.prefix_end : 0);
    if (begin >= end) continue;
    hull.begin = std::min(hull.begin, begin);
    hull.end = std::max(hull.end, end);
  }
  if (hull.begin >= hull.end) return {};
  return hull;
}

int64_t cost_of(int64_t heads, int64_t rows, int64_t keys) {
  // Loading and transposing a key costs about as much as the products of 24 rows with it.
  constexpr int64_t kRowsPerKeyLoad = 24;
  return heads * (rows + kRowsPerKeyLoad) * keys;
}

int64_t cost_of(const AttentionItem& item) {
  return cost_of(item.head_end - item.head_begin, item.row_end - item.row_begin,
                 item.kv_end - item.kv_begin);
}

class Planner {
 public:
  Planner(const AttentionShape& shape, const AttentionParams& params,
          std::span<AttentionItem> items, std::span<AttentionMerge> merges)
      : shape_(shape),
        params_(params),
        group_(shape.q_heads / shape.kv_heads),
        items_(items),
        merges_(merges) {
    int64_t total = 0;
    for (int32_t i = 0; i < params.requests; ++i) {
      const int64_t rows = int64_t{q_len(i)} * group_;
      const int64_t max_tiles = rows / split_row_capacity(shape) + 1;
      total += max_tiles *
               cost_of(shape.kv_heads, (rows + max_tiles - 1) / max_tiles, params.kv_lens[i]);
    }
    quantum_ = total / (kItemsPerThread * shape.threads) + 1;
  }

  void run() {
    for (int32_t request = 0; request < params_.requests; ++request) plan_request(request);
    std::sort(items_.begin(), items_.begin() + item_count_,
              [](const AttentionItem& a, const AttentionItem& b) {
                const int64_t cost_a = cost_of(a);
                const int64_t cost_b = cost_of(b);
                if (cost_a != cost_b) return cost_a > cost_b;
                if (a.request != b.request) return a.request < b.request;
                if (a.head_begin != b.head_begin) return a.head_begin < b.head_begin;
                if (a.row_begin != b.row_begin) return a.row_begin < b.row_begin;
                return a.kv_begin < b.kv_begin;
              });
  }

  std::span<const AttentionItem> items() const { return items_.first(item_count_); }
  std::span<const AttentionMerge> merges() const { return merges_.first(merge_count_); }

 private:
  int32_t q_len(int32_t request) const {
    return params_.q_indptr[request + 1] - params_.q_indptr[request];
  }

  void plan_request(int32_t request) {
    const MaskView mask = mask_view(params_, request);
    const int64_t rows = int64_t{mask.q_len} * group_;
    if (rows == 0) return;
    int32_t tile_rows = row_capacity(shape_);
    if (cost_of(1, std::min<int64_t>(rows, tile_rows), mask.kv_len) > quantum_) {
      tile_rows = split_row_capacity(shape_);
    }
    const int64_t tiles = (rows + tile_rows - 1) / tile_rows;
    const int64_t even_rows = padded_rows(static_cast<int32_t>((rows + tiles - 1) / tiles));
    for (int64_t begin = 0; begin < rows; begin += even_rows) {
      AttentionItem tile;
      tile.request = request;
      tile.row_begin = static_cast<int32_t>(begin);
      tile.row_end = static_cast<int32_t>(std::min(rows, begin + even_rows));
      const KeyHull keys =
          visible_keys(mask, tile.row_begin / group_, (tile.row_end + group_ - 1) / group_);
      tile.kv_begin = keys.begin;
      tile.kv_end = keys.end;
      const int32_t heads = heads_per_item(tile);
      const int32_t tile_heads = shares_partials(heads, tile) ? shape_.kv_heads : heads;
      for (int32_t head = 0; head < shape_.kv_heads; head += tile_heads) {
        tile.head_begin = head;
        tile.head_end = std::min(shape_.kv_heads, head + tile_heads);
        add_tile(tile, heads);
      }
    }
  }

  // Returns how many heads an item takes. Items of decode steps take many heads at once, so that a
  // page is read from front to back (2026-11-22: 4 heads of 512 keys take 4 to 12 % less time than
  // 2 heads of 1024). Pieces of 512 keys then cost up to two quanta.
  int32_t heads_per_item(const AttentionItem& tile) const {
    const int32_t rows = tile.row_end - tile.row_begin;
    if (rows > kBlockRows) return 1;
    const int64_t keys = tile.kv_end - tile.kv_begin;
    const int64_t chunks = (keys + kChunkKeys - 1) / kChunkKeys;
    int32_t heads = std::clamp(split_row_capacity(shape_) / padded_rows(rows), 1, shape_.kv_heads);
    while (heads > 1 && cost_of(heads, rows, keys) > 2 * chunks * quantum_) {
      heads = (heads + 1) / 2;
    }
    return heads;
  }

  // Returns whether all heads of the tile share partial results although an item takes `heads` of
  // them. That holds for the only request of a batch if it has few rows: its pieces can then read
  // whole pages.
  bool shares_partials(int32_t heads, const AttentionItem& tile) const {
    const int32_t rows = tile.row_end - tile.row_begin;
    return params_.requests == 1 && rows <= kBlockRows && shape_.kv_heads % heads == 0 &&
           shape_.kv_heads * padded_rows(rows) <= split_row_capacity(shape_);
  }

  // Adds items of `heads` heads each. If the keys are cut into pieces, as many pieces as fill the
  // threads evenly take all heads at once and read whole pages (2026-11-23: 5 to 10 % of a single
  // request of 1024 keys with two threads).
  void add_tile(const AttentionItem& tile, int32_t heads) {
    AttentionItem part = tile;
    part.head_end = std::min(tile.head_end, tile.head_begin + heads);
    const int32_t rows = padded_rows(tile.row_end - tile.row_begin);
    const int64_t cost = cost_of(part);
    if (cost <= 2 * quantum_ || rows * heads > split_row_capacity(shape_) ||
        tile.kv_begin / kChunkKeys == (tile.kv_end - 1) / kChunkKeys) {
      return add_items(tile, heads);
    }
    const int64_t key_cost = cost / (tile.kv_end - tile.kv_begin);
    int64_t piece_keys = kChunkKeys;
    while (piece_keys * key_cost < quantum_) piece_keys *= 2;
    const int64_t first = tile.kv_begin / piece_keys;
    const int64_t last = (tile.kv_end - 1) / piece_keys;
    if (first == last) return add_items(tile, heads);

    const int64_t whole = tile.kv_end / piece_keys - (tile.kv_begin + piece_keys - 1) / piece_keys;
    int64_t all_heads_pieces = whole / shape_.threads * shape_.threads;
    AttentionMerge merge;
    merge.tile = tile;
    merge.tile.partial = partial_floats_;
    merge.tile.partial_head = tile.head_begin;
    merge.tile.partial_heads = tile.head_end - tile.head_begin;
    merge.partial_stride = int64_t{rows} * merge.tile.partial_heads * (padded_dim_v() + 2);
    merge.first_piece = static_cast<int32_t>(first);
    merge.pieces = static_cast<int32_t>(last - first + 1);
    for (int64_t piece = first; piece <= last; ++piece) {
      part = merge.tile;
      part.kv_begin = static_cast<int32_t>(std::max<int64_t>(tile.kv_begin, piece * piece_keys));
      part.kv_end = static_cast<int32_t>(std::min<int64_t>(tile.kv_end, (piece + 1) * piece_keys));
      part.partial = partial_floats_;
      partial_floats_ += merge.partial_stride;
      if (all_heads_pieces > 0 && part.kv_end - part.kv_begin == piece_keys) {
        add_item(part);
        --all_heads_pieces;
      } else {
        add_items(part, heads);
      }
    }
    for_each_part(merge.tile, heads, [&](const AttentionItem& heads_of_tile) {
      merge.tile = heads_of_tile;
      merges_[merge_count_++] = merge;
    });
  }

  template <class Function>
  static void for_each_part(AttentionItem tile, int32_t heads, const Function& function) {
    for (const int32_t end = tile.head_end; tile.head_begin < end; tile.head_begin += heads) {
      tile.head_end = std::min(end, tile.head_begin + heads);
      function(tile);
    }
  }

  void add_items(const AttentionItem& tile, int32_t heads) {
    for_each_part(tile, heads, [&](const AttentionItem& part) { add_item(part); });
  }

  void add_item(const AttentionItem& item) { items_[item_count_++] = item; }

  int64_t padded_dim_v() const {
    return (shape_.head_dim_v + kPadFloats - 1) / kPadFloats * kPadFloats;
  }

  const AttentionShape& shape_;
  const AttentionParams& params_;
  const int32_t group_;
  std::span<AttentionItem> items_;
  std::span<AttentionMerge> merges_;
  int64_t quantum_ = 0;
  size_t item_count_ = 0;
  size_t merge_count_ = 0;
  int64_t partial_floats_ = 0;
};

}  // namespace

AttentionSchedule plan_attention(const AttentionShape& shape, const AttentionParams& params,
                                 std::span<std::byte> workspace) {
  AttentionNeed need;
  need.requests = params.requests;
  need.tokens = params.requests > 0 ? params.q_indptr[params.requests] : 0;
  for (int32_t i = 0; i < params.requests; ++i) {
    need.max_kv_len = std::max(need.max_kv_len, params.kv_lens[i]);
  }
  const AttentionLayout layout(shape, need);
  if (workspace.size() < layout.total) {
    fail(ErrorCode::workspace_too_small,
         "the attention workspace has {} bytes, this batch needs {}", workspace.size(),
         layout.total);
  }
  std::byte* memory = workspace.data();
  Planner planner(shape, params,
                  {reinterpret_cast<AttentionItem*>(memory + layout.items_at),
                   static_cast<size_t>(layout.items)},
                  {reinterpret_cast<AttentionMerge*>(memory + layout.merges_at),
                   static_cast<size_t>(layout.merges)});
  planner.run();
  AttentionSchedule schedule;
  schedule.items = planner.items();
  schedule.merges = planner.merges();
  schedule.partials = reinterpret_cast<float*>(memory + layout.partials_at);
  schedule.scratch = memory + layout.scratch_at;
  schedule.max_kv_len = need.max_kv_len;
  return schedule;
}

}  // namespace fovea::kernels::cpu
