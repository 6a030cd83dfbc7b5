// SPDX-License-Identifier: Apache-2.0
// One work item of attention: rows of some kv heads of one request against a range of its keys.
#include "kernels/cpu/simd/attention_item.h"
#include "kernels/cpu/simd/attention_item_keys.h"
#include "kernels/cpu/simd/attention_item_values.h"

namespace fovea::kernels::cpu::FOVEA_ISA {
namespace {

// Of groups of values after the first one of a tile.
alignas(64) constexpr float kNoDecay[kPadFloats] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};

class ItemRunner {
 public:
  ItemRunner(const AttentionCall& call, const AttentionItem& item, const AttentionScratch& scratch)
      : view_(call, item, scratch),
        keys_(view_),
        values_(view_),
        mask_(mask_view(view_.params, item.request)),
        adjuster_(view_.params, item, mask_, scratch.bounds, view_.shape.group),
        state_(scratch.states[0]),
        tree_(view_.shape, scratch.states + 1, view_.paths.wide ? merge_wide_states : merge_states),
        token_scales_(view_.params.keys.page_table &&
                      view_.params.keys.cache.scale == KvScale::per_token_head) {
    const RowShape& rows = view_.shape;
    for (int32_t head = 0; head < rows.heads; ++head) {
      const auto loader = view_.paths.wide ? load_wide_queries : load_queries;
      loader(view_.params, item, rows, item.head_begin + head, scratch.k_rows,
             scratch.q + static_cast<int64_t>(head) * rows.head_rows * padded(rows.dim));
    }
    for (int32_t r = 0; r < rows.rows; ++r) {
      scratch.bounds[r] = row_bounds(mask_, (item.row_begin + r) / rows.group);
    }
    const int32_t block_rows = view_.paths.block_rows;
    for (int32_t first = 0; first < rows.rows; first += block_rows) {
      blocks_[first / block_rows] =
          row_block(scratch.bounds, first, smaller(block_rows, rows.rows - first));
    }
  }

  // Runs, then writes the results or leaves them as partials.
  void finish(const AttentionCall& call) {
    const RowShape& shape = view_.shape;
    const RowStates& state = run();
    if (!view_.paths.wide) return leave(call, 0, shape.total(), state);
    for (int32_t b = 0; b < view_.blocks(); ++b) {
      const int32_t first = blocks_[b].first;
      RowStates rows = states_from(shape, state, first);
      columns_to_rows(rows.o, blocks_[b].rows, shape.o_stride, view_.scratch.v_strips);
      rows.o = view_.scratch.v_strips;
      leave(call, first, smaller(first + kWideRows, shape.total()), rows);
    }
  }

 private:
  RowStates& run() {
    start_chunk();
    const int32_t first_tile = view_.item.kv_begin / kTileKeys * kTileKeys;
    locate(first_tile, view_.later);
    for (int32_t tile = first_tile; tile < view_.item.kv_end; tile += kTileKeys) {
      const int32_t next = tile + kTileKeys;
      view_.here = view_.later;
      locate(next, view_.later);
      const bool ends_chunk = next % kChunkKeys == 0 || next >= view_.item.kv_end;
      attend(tile, ends_chunk);
      if (!ends_chunk) continue;
      end_chunk(chunk_of(tile));
      if (next >= view_.item.kv_end) return tree_.result();
      start_chunk();
    }
    if (view_.paths.wide) clear_o(padded(view_.shape.rows), view_.shape.o_stride, state_.o);
    return state_;  // no keys
  }

  // The results of places [first, last).
  void leave(const AttentionCall& call, int32_t first, int32_t last, const RowStates& state) const {
    const RowShape& shape = view_.shape;
    if (view_.item.partial < 0) {
      return write_rows(view_.params, view_.item, shape, first, last, state);
    }
    const RowStates to = states_from(shape, partial_state(call, shape, view_.item), first);
    const auto places = static_cast<size_t>(last - first);
    memcpy(to.o, state.o, places * shape.o_stride * sizeof(float));
    memcpy(to.m, state.m, places * sizeof(float));
    memcpy(to.l, state.l, places * sizeof(float));
  }

  void start_chunk() {
    const int32_t rows = view_.paths.wide ? padded(view_.shape.rows) : view_.shape.total();
    clear_sums(rows, state_);
    if (view_.paths.wide) {
      for (bool& empty : empty_) empty = true;
    } else {
      clear_o(rows, view_.shape.o_stride, state_.o);
    }
    for (int32_t i = 0; i < rows * kPadFloats; ++i) view_.scratch.l_lanes[i] = 0;
  }

  static uint32_t chunk_of(int32_t tile) { return static_cast<uint32_t>(tile / kChunkKeys); }

  void end_chunk(uint32_t chunk) {
    if (view_.paths.wide) return tree_.add_merged(chunk, state_);
    for (int32_t place = 0; place < view_.shape.total(); ++place) {
      const F32 lanes = load(view_.scratch.l_lanes + place * kPadFloats);
      state_.l[place] = hn::GetLane(hn::SumOfLanes(kF32, lanes));
    }
    tree_.add(chunk, state_);
  }

  // A wide block has met the chunk's keys. Its o is merged while it is in the first cache.
  void end_wide_block(uint32_t chunk, int32_t b) {
    const RowBlock& block = blocks_[b];
    if (empty_[b]) clear_o(padded(block.rows), view_.shape.o_stride, o(block));
    const WideSums sums = {l_lanes(block), state_.l + view_.place(block)};
    with_wide_vectors(wide_vectors(block.rows), sums);
    tree_.for_each_sibling(chunk, [&](const RowStates& earlier) {
      merge_wide_block(view_.shape, block.first, earlier, state_);
    });
  }

  // Beyond the last tile there are no keys.
  void locate(int32_t tile, TileKeys& to) const {
    view_.reader.locate(tile, larger(view_.item.kv_begin - tile, 0),
                        smaller(view_.item.kv_end - tile, kTileKeys), to);
    if (token_scales_) view_.reader.ask_for_scales(to, view_.item.head_begin);
  }

  // All rows against one tile. Few rows of many heads meet a group of keys of every head, then the
  // next group, then the values in the same way, so that pages are read as they lie: on a Zen 5 f32
  // in groups of 16 instead of 64 gets 0.84 instead of 0.79 of the read bandwidth (2026-11-22), on
  // a shared Emerald Rapids, whose first cache they spare, 32 take 2 to 4 % less time than 16
  // (2026-11-23). fp8, bound by instructions, gets 0.68 both ways. Of many rows there is one head.
  void attend(int32_t tile, bool ends_chunk) {
    if (view_.paths.by_pairs) {
      view_.pairs.start(&view_.here, &view_.later);
    } else if (view_.paths.one_block) {
      view_.near.start(&view_.here, &view_.later, view_.rows_near);
      view_.far.start(&view_.here, &view_.later, view_.rows_far);
    } else {
      view_.near.start(&view_.later, nullptr, 0);
    }
    if (token_scales_) load_token_scales();
    if (!view_.paths.few_rows) {
      keys_.start(view_.here.begin, view_.here.end);
      values_.start();
      for (int32_t b = 0; b < view_.blocks(); ++b) {
        const auto [begin, end] = seen_keys(blocks_[b], tile);
        if (view_.paths.wide) {
          if (begin < end) attend_wide(tile, b, begin, end);
          if (ends_chunk) end_wide_block(chunk_of(tile), b);
        } else if (begin < end) {
          keys_.multiply(blocks_[b], begin, end);
          weigh(tile, blocks_[b], begin, end);
          values_.add(blocks_[b], decay_, begin, end);
        }
      }
      return;
    }
    const int32_t keys = view_.paths.group_keys;
    for_each_group(keys,
                   [&](int32_t head, int32_t group) { score_group(tile, head, group, keys); });
    const int32_t values = view_.paths.values_by_group() ? keys : kTileKeys;
    for_each_group(values,
                   [&](int32_t head, int32_t group) { add_group(tile, head, group, values); });
  }

  void attend_wide(int32_t tile, int32_t b, int32_t begin, int32_t end) {
    const RowBlock& block = blocks_[b];
    float* scores = view_.scratch.scores;
    keys_.multiply_wide(block, begin, end, scores);
    WideSoftmax softmax;
    softmax.scores = scores;
    softmax.first = begin / kLanes * kLanes;
    softmax.last = (end + kLanes - 1) / kLanes * kLanes;
    softmax.factor = score_factor(view_.params, view_.item.head_begin);
    softmax.v_scales = token_scales_ ? v_scales() : nullptr;
    softmax.m = state_.m + view_.place(block);
    softmax.l_lanes = l_lanes(block);
    softmax.decay = decay_;
    const int32_t vectors = wide_vectors(block.rows);
    if (token_scales_) {
      scale_wide_scores(k_scales(), vectors, softmax.first, softmax.last, scores);
    }
    if (tile + softmax.first < block.inner_begin || tile + softmax.last > block.inner_end) {
      hide_outside(view_.scratch.bounds + block.first, block.rows, tile, softmax.first,
                   softmax.last, scores);
    }
    with_wide_vectors(vectors, softmax);
    values_.add_wide(block, scores, empty_[b] ? nullptr : decay_, begin, end);
    empty_[b] = false;
  }

  template <class Function>
  void for_each_group(int32_t keys, const Function& function) {
    for (int32_t group = view_.here.begin / keys * keys; group < view_.here.end; group += keys) {
      for (int32_t head = 0; head < view_.shape.heads; ++head) {
        function(head, group);
        if (view_.paths.by_pairs) view_.pairs.step();
      }
    }
  }

  void score_group(int32_t tile, int32_t head, int32_t group, int32_t keys) {
    const int32_t end = group + keys;
    view_.head = head;
    keys_.start(larger(group, view_.here.begin), smaller(end, view_.here.end));
    for (int32_t b = 0; b < view_.blocks(); ++b) {
      const Range seen = seen_keys(blocks_[b], tile);
      keys_.multiply(blocks_[b], larger(group, seen.begin), smaller(end, seen.end));
    }
  }

  void add_group(int32_t tile, int32_t head, int32_t group, int32_t keys) {
    view_.head = head;
    values_.start();
    for (int32_t b = 0; b < view_.blocks(); ++b) {
      const Range seen = seen_keys(blocks_[b], tile);
      const int32_t begin = larger(group, seen.begin);
      const int32_t end = smaller(group + keys, seen.end);
      if (begin >= end) continue;
      const bool first = begin == seen.begin;
      if (first) weigh(tile, blocks_[b], seen.begin, seen.end);
      values_.add(blocks_[b], first ? decay_ : kNoDecay, begin, end);
    }
  }

  // Of the keys of the tile, then of their values; of all heads, as they lie next to each other.
  void load_token_scales() {
    const KvLayerView& cache = view_.params.keys.cache;
    const float* v_scale = view_.reader.v_in_k ? cache.k_scale : cache.v_scale;
    load_scales(view_.here, cache.k_scale + view_.item.head_begin, view_.shape.heads,
                view_.scratch.scales);
    load_scales(view_.here, v_scale + view_.item.head_begin, view_.shape.heads,
                view_.scratch.scales + view_.shape.heads * kTileKeys);
  }
  const float* k_scales() const { return view_.scratch.scales + view_.head * kTileKeys; }
  const float* v_scales() const { return k_scales() + view_.shape.heads * kTileKeys; }

  // Keys of the tile that rows of the block see lie in [begin, end).
  Range seen_keys(const RowBlock& block, int32_t tile) const {
    return {larger(block.begin - tile, view_.here.begin),
            smaller(block.end - tile, view_.here.end)};
  }

  float* o(const RowBlock& block) const {
    return state_.o + int64_t{view_.place(block)} * view_.shape.o_stride;
  }

  float* l_lanes(const RowBlock& block) const {
    return view_.scratch.l_lanes + view_.place(block) * kPadFloats;
  }

  // Turns the block's products with the keys [begin, end) into weights, and sets decay_.
  void weigh(int32_t tile, const RowBlock& block, int32_t begin, int32_t end) {
    const float factor = score_factor(view_.params, view_.item.head_begin + view_.head);
    const KeysOfHead keys = {tile,           view_.here.begin,
                             view_.here.end, view_.this_head(),
                             factor,         token_scales_ ? k_scales() : nullptr};
    adjuster_.adjust(block, keys, begin, end, view_.scores(block));
    SoftmaxTile softmax;
    softmax.scores = view_.scores(block);
    softmax.begin = begin / kLanes;
    softmax.end = (end + kLanes - 1) / kLanes;
    softmax.rows = block.rows;
    softmax.factor = view_.params.logit_cap > 0 || view_.params.alibi_slopes ? 1.0f : factor;
    softmax.v_scales = token_scales_ ? v_scales() : nullptr;
    softmax.m = state_.m + view_.place(block);
    softmax.l_lanes = l_lanes(block);
    softmax.decay = decay_;
    softmax_tile(softmax);
  }

  ItemView view_;
  KeyProducts keys_;
  ValueProducts values_;
  const MaskView mask_;
  ScoreAdjuster adjuster_;
  RowStates& state_;
  StateTree tree_;
  const bool token_scales_;
  RowBlock blocks_[kMaxRows / kProductRows];
  bool empty_[kMaxRows / kWideRows];  // of the chunk at work: o of the wide block is not yet set
  alignas(64) float decay_[kWideRows];
};

}  // namespace

void attention_item(const AttentionCall& call, const AttentionItem& item,
                    const AttentionScratch& scratch) {
  ItemRunner(call, item, scratch).finish(call);
}

void attention_merge(const AttentionCall& call, const AttentionMerge& merge) {
  constexpr int32_t kLevels = 33;
  const RowShape shape(*call.params, merge.tile);
  RowStates states[kLevels] = {};
  StateTree tree(shape, states);
  AttentionItem part = merge.tile;
  for (int32_t piece = 0; piece < merge.pieces; ++piece, part.partial += merge.partial_stride) {
    RowStates state = partial_state(call, shape, part);
    tree.add(static_cast<uint32_t>(merge.first_piece + piece), state);
  }
  write_rows(*call.params, merge.tile, shape, 0, shape.total(), tree.result());
}

}  // namespace fovea::kernels::cpu::FOVEA_ISA
