// SPDX-License-Identifier: Apache-2.0
// One work item of attention: rows of some kv heads of one request against a range of its keys.
//
// How to read this folder:
//   work.h, mask.h     the planner's input; masks as intervals
//   modes.h            the shape of an item, and the one place that decides how it is computed
//   item_context.h     the state that the classes below share
//   attention_item.cc  ItemRunner: the loop over tiles, from keys to results
//   tile_scores.h      queries x keys of a tile        score_kernels.h, transpose.h
//   adjust_scores.h    scales, soft cap, ALiBi, masks
//   softmax.h          the online softmax              exponentials.h
//   tile_values.h      weights x values of a tile      value_kernels.h
//   lane_blocks.h      all of these for blocks of many rows
//   states.h, rows.h   merging states; queries in, results out
//   keys.h, kv_scales.h, fp8.h, prefetch.h, page_pairs.h
//                      where keys lie, how they are converted and prefetched
#include "kernels/cpu/simd/attention/adjust_scores.h"
#include "kernels/cpu/simd/attention/item_context.h"
#include "kernels/cpu/simd/attention/kv_scales.h"
#include "kernels/cpu/simd/attention/rows.h"
#include "kernels/cpu/simd/attention/softmax.h"
#include "kernels/cpu/simd/attention/states.h"
#include "kernels/cpu/simd/attention/tile_scores.h"
#include "kernels/cpu/simd/attention/tile_values.h"

namespace fovea::kernels::cpu::FOVEA_ISA {
namespace {

// The decay for every group of values of a tile but the first.
alignas(64) constexpr float kNoDecay[kPadFloats] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};

class ItemRunner {
 public:
  ItemRunner(const AttentionCall& call, const AttentionItem& work, const AttentionScratch& scratch)
      : item_(call, work, scratch),
        scores_(item_),
        values_(item_),
        mask_(mask_view(item_.params, work.request)),
        adjuster_(item_.params, work, mask_, scratch.bounds, item_.shape.group),
        state_(scratch.states[0]),
        tree_(item_.shape, scratch.states + 1, lanes() ? merge_lane_states : merge_states),
        token_scales_(item_.params.keys.page_table &&
                      item_.params.keys.cache.scale == KvScale::per_token_head) {
    const ItemShape& shape = item_.shape;
    for (int32_t head = 0; head < shape.heads; ++head) {
      const HeadQueries queries(item_.params, work, shape, work.head_begin + head);
      float* q = scratch.q + static_cast<int64_t>(head) * shape.head_rows * padded(shape.dim);
      if (lanes()) {
        queries.load_lane_blocks(scratch.k_rows, q);
      } else {
        queries.load_row_blocks(scratch.k_rows, q);
      }
    }
    for (int32_t r = 0; r < shape.rows; ++r) {
      scratch.bounds[r] = row_bounds(mask_, (work.row_begin + r) / shape.group);
    }
    const int32_t block_rows = item_.modes.block_rows;
    for (int32_t first = 0; first < shape.rows; first += block_rows) {
      blocks_[first / block_rows] =
          row_block(scratch.bounds, first, smaller(block_rows, shape.rows - first));
    }
  }

  // Attends to all keys, then writes the results or stores them as a partial.
  void run(const AttentionCall& call) {
    const ItemShape& shape = item_.shape;
    const RowStates& state = attend_keys();
    if (!lanes()) return finish_rows(call, 0, shape.state_rows(), state);
    for (int32_t b = 0; b < item_.blocks(); ++b) {
      const int32_t first = blocks_[b].first;
      RowStates rows = states_from(shape, state, first);
      columns_to_rows(rows.o, blocks_[b].rows, shape.o_stride, item_.scratch.v_strips);
      rows.o = item_.scratch.v_strips;
      finish_rows(call, first, smaller(first + kLaneRows, shape.state_rows()), rows);
    }
  }

 private:
  bool lanes() const { return item_.modes.rows == RowMode::lane_blocks; }

  RowStates& attend_keys() {
    start_chunk();
    const int32_t end = item_.work.kv_end;
    const int32_t first_tile = item_.work.kv_begin / kTileKeys * kTileKeys;
    locate(first_tile, item_.next_tile);
    for (int32_t tile_begin = first_tile; tile_begin < end; tile_begin += kTileKeys) {
      const int32_t next = tile_begin + kTileKeys;
      item_.tile = item_.next_tile;
      locate(next, item_.next_tile);
      const bool ends_chunk = next % kChunkKeys == 0 || next >= end;
      attend_tile(tile_begin, ends_chunk);
      if (!ends_chunk) continue;
      end_chunk(chunk_of(tile_begin));
      if (next >= end) return tree_.result();
      start_chunk();
    }
    // The item has no keys.
    if (lanes()) clear_o(padded(item_.shape.rows), item_.shape.o_stride, state_.o);
    return state_;
  }

  // Writes the results of state rows [first, last), or stores them in the item's partial.
  void finish_rows(const AttentionCall& call, int32_t first, int32_t last,
                   const RowStates& state) const {
    const ItemShape& shape = item_.shape;
    if (item_.work.partial < 0) {
      return write_rows(item_.params, item_.work, shape, first, last, state);
    }
    const RowStates to = states_from(shape, partial_state(call, shape, item_.work), first);
    const auto rows = static_cast<size_t>(last - first);
    memcpy(to.o, state.o, rows * shape.o_stride * sizeof(float));
    memcpy(to.m, state.m, rows * sizeof(float));
    memcpy(to.l, state.l, rows * sizeof(float));
  }

  void start_chunk() {
    const int32_t rows = lanes() ? padded(item_.shape.rows) : item_.shape.state_rows();
    clear_sums(rows, state_);
    if (lanes()) {
      for (bool& empty : lane_block_empty_) empty = true;
    } else {
      clear_o(rows, item_.shape.o_stride, state_.o);
    }
    for (int32_t i = 0; i < rows * kPadFloats; ++i) item_.scratch.l_lanes[i] = 0;
  }

  static uint32_t chunk_of(int32_t tile_begin) {
    return static_cast<uint32_t>(tile_begin / kChunkKeys);
  }

  void end_chunk(uint32_t chunk) {
    if (lanes()) return tree_.add_merged(chunk, state_);
    for (int32_t row = 0; row < item_.shape.state_rows(); ++row) {
      const F32 sums = load(item_.scratch.l_lanes + row * kPadFloats);
      state_.l[row] = hn::GetLane(hn::SumOfLanes(kF32, sums));
    }
    tree_.add(chunk, state_);
  }

  // Merges a lane block that has met all keys of the chunk, while its o is in the first-level
  // cache.
  void end_lane_block(uint32_t chunk, int32_t b) {
    const RowBlock& block = blocks_[b];
    if (lane_block_empty_[b]) {
      clear_o(padded(block.rows), item_.shape.o_stride, item_.o(block));
    }
    const LaneSums sums = {l_lanes(block), state_.l + item_.state_row(block)};
    with_lane_vectors(lane_vectors(block.rows), sums);
    tree_.for_each_sibling(chunk, [&](const RowStates& earlier) {
      merge_lane_block(item_.shape, block.first, earlier, state_);
    });
  }

  // Finds the keys of a tile. After the last tile there are none.
  void locate(int32_t tile_begin, TileKeys& to) const {
    item_.reader.locate(tile_begin, larger(item_.work.kv_begin - tile_begin, 0),
                        smaller(item_.work.kv_end - tile_begin, kTileKeys), to);
    if (token_scales_) item_.reader.prefetch_scales(to, item_.work.head_begin);
  }

  // Attends with all rows to one tile.
  void attend_tile(int32_t tile_begin, bool ends_chunk) {
    if (item_.modes.page_pairs) {
      item_.pairs.start(&item_.tile, &item_.next_tile);
    } else if (item_.modes.one_block) {
      item_.l1_stream.start(&item_.tile, &item_.next_tile, item_.l1_rows);
      item_.l2_stream.start(&item_.tile, &item_.next_tile, item_.l2_rows);
    } else {
      item_.l2_stream.start(&item_.next_tile, nullptr, 0);
    }
    if (token_scales_) load_token_scales();
    if (item_.modes.rows == RowMode::all_heads) {
      attend_all_heads(tile_begin);
    } else {
      attend_one_head(tile_begin, ends_chunk);
    }
  }

  // RowMode::row_blocks and lane_blocks.
  void attend_one_head(int32_t tile_begin, bool ends_chunk) {
    scores_.start({item_.tile.begin, item_.tile.end});
    values_.start();
    for (int32_t b = 0; b < item_.blocks(); ++b) {
      const Range keys = visible_keys(blocks_[b], tile_begin);
      if (lanes()) {
        if (keys.begin < keys.end) attend_lane_block(tile_begin, b, keys);
        if (ends_chunk) end_lane_block(chunk_of(tile_begin), b);
      } else if (keys.begin < keys.end) {
        scores_.multiply(blocks_[b], keys);
        compute_weights(tile_begin, blocks_[b], keys);
        values_.add(blocks_[b], decay_, keys);
      }
    }
  }

  // RowMode::all_heads. Groups of 32 keys of f32 and bf16 rows use memory better than groups of 16
  // or 64 (chosen 2026-11-22: up to 6 %). fp8 gains nothing.
  void attend_all_heads(int32_t tile_begin) {
    const int32_t keys = item_.modes.group_keys;
    for_each_group(keys, [&](Range group) { score_group(tile_begin, group); });
    const int32_t value_keys = item_.modes.value_group_keys;
    for_each_group(value_keys, [&](Range group) { add_group(tile_begin, group); });
  }

  // Calls function(group) for each group of `keys` keys and, within a group, for each head.
  template <class Function>
  void for_each_group(int32_t keys, const Function& function) {
    const TileKeys& tile = item_.tile;
    for (int32_t begin = tile.begin / keys * keys; begin < tile.end; begin += keys) {
      for (int32_t head = 0; head < item_.shape.heads; ++head) {
        item_.head = head;
        function(Range{begin, begin + keys});
        if (item_.modes.page_pairs) item_.pairs.step();
      }
    }
  }

  void score_group(int32_t tile_begin, Range group) {
    scores_.start({larger(group.begin, item_.tile.begin), smaller(group.end, item_.tile.end)});
    for (int32_t b = 0; b < item_.blocks(); ++b) {
      const Range seen = visible_keys(blocks_[b], tile_begin);
      scores_.multiply(blocks_[b], {larger(group.begin, seen.begin), smaller(group.end, seen.end)});
    }
  }

  void add_group(int32_t tile_begin, Range group) {
    values_.start();
    for (int32_t b = 0; b < item_.blocks(); ++b) {
      const Range seen = visible_keys(blocks_[b], tile_begin);
      const Range keys = {larger(group.begin, seen.begin), smaller(group.end, seen.end)};
      if (keys.begin >= keys.end) continue;
      const bool first = keys.begin == seen.begin;
      if (first) compute_weights(tile_begin, blocks_[b], seen);
      values_.add(blocks_[b], first ? decay_ : kNoDecay, keys);
    }
  }

  void attend_lane_block(int32_t tile_begin, int32_t b, Range keys) {
    const RowBlock& block = blocks_[b];
    float* scores = item_.scratch.scores;
    scores_.multiply_lane_block(block, keys, scores);
    const Range whole = whole_vectors(keys);
    LaneSoftmax softmax;
    softmax.scores = scores;
    softmax.first = whole.begin;
    softmax.last = whole.end;
    softmax.factor = score_factor(item_.params, item_.work.head_begin);
    softmax.v_scales = token_scales_ ? v_scales() : nullptr;
    softmax.m = state_.m + item_.state_row(block);
    softmax.l_lanes = l_lanes(block);
    softmax.decay = decay_;
    const int32_t vectors = lane_vectors(block.rows);
    if (token_scales_) scale_lane_scores(k_scales(), vectors, whole, scores);
    if (tile_begin + whole.begin < block.inner.begin || tile_begin + whole.end > block.inner.end) {
      hide_outside_lanes(item_.scratch.bounds + block.first, block.rows, tile_begin, whole, scores);
    }
    with_lane_vectors(vectors, softmax);
    values_.add_lane_block(block, scores, lane_block_empty_[b] ? nullptr : decay_, keys);
    lane_block_empty_[b] = false;
  }

  // Turns the products of a row block with `keys` into weights, and sets decay_.
  void compute_weights(int32_t tile_begin, const RowBlock& block, Range keys) {
    const float factor = score_factor(item_.params, item_.work.head_begin + item_.head);
    const HeadTile tile = {tile_begin,
                           {item_.tile.begin, item_.tile.end},
                           item_.kv_head(),
                           factor,
                           token_scales_ ? k_scales() : nullptr};
    adjuster_.adjust(block, tile, keys, item_.scores(block));
    SoftmaxTile softmax;
    softmax.scores = item_.scores(block);
    softmax.begin = keys.begin / kLanes;
    softmax.end = (keys.end + kLanes - 1) / kLanes;
    softmax.rows = block.rows;
    softmax.factor = adjuster_.has_log2_scores() ? 1.0f : factor;
    softmax.v_scales = token_scales_ ? v_scales() : nullptr;
    softmax.m = state_.m + item_.state_row(block);
    softmax.l_lanes = l_lanes(block);
    softmax.decay = decay_;
    softmax_tile(softmax);
  }

  // Loads the scales of the tile's keys, then those of its values, for all heads of the item: the
  // scales of a token's heads are adjacent.
  void load_token_scales() {
    const KvLayerView& cache = item_.params.keys.cache;
    const float* v_scale = item_.reader.v_in_k ? cache.k_scale : cache.v_scale;
    load_scales(item_.tile, cache.k_scale + item_.work.head_begin, item_.shape.heads,
                item_.scratch.scales);
    load_scales(item_.tile, v_scale + item_.work.head_begin, item_.shape.heads,
                item_.scratch.scales + item_.shape.heads * kTileKeys);
  }
  const float* k_scales() const { return item_.scratch.scales + item_.head * kTileKeys; }
  const float* v_scales() const { return k_scales() + item_.shape.heads * kTileKeys; }

  // Returns a range of the tile that contains every key that some row of the block sees.
  Range visible_keys(const RowBlock& block, int32_t tile_begin) const {
    return {larger(block.keys.begin - tile_begin, item_.tile.begin),
            smaller(block.keys.end - tile_begin, item_.tile.end)};
  }

  float* l_lanes(const RowBlock& block) const {
    return item_.scratch.l_lanes + item_.state_row(block) * kPadFloats;
  }

  ItemContext item_;
  TileScores scores_;
  TileValues values_;
  const MaskView mask_;
  ScoreAdjuster adjuster_;
  RowStates& state_;
  StateTree tree_;
  const bool token_scales_;
  RowBlock blocks_[kMaxRows / kProductRows];
  bool lane_block_empty_[kMaxRows / kLaneRows];  // o of the lane block has nothing of this chunk
  alignas(64) float decay_[kLaneRows];
};

}  // namespace

void attention_item(const AttentionCall& call, const AttentionItem& item,
                    const AttentionScratch& scratch) {
  ItemRunner(call, item, scratch).run(call);
}

void attention_merge(const AttentionCall& call, const AttentionMerge& merge) {
  constexpr int32_t kLevels = 33;
  const ItemShape shape(*call.params, merge.tile);
  RowStates states[kLevels] = {};
  StateTree tree(shape, states);
  AttentionItem piece = merge.tile;
  for (int32_t i = 0; i < merge.pieces; ++i, piece.partial += merge.partial_stride) {
    RowStates state = partial_state(call, shape, piece);
    tree.add(static_cast<uint32_t>(merge.first_piece + i), state);
  }
  write_rows(*call.params, merge.tile, shape, 0, shape.state_rows(), tree.result());
}

}  // namespace fovea::kernels::cpu::FOVEA_ISA
