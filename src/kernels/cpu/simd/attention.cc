// SPDX-License-Identifier: Apache-2.0
// One work item of attention: rows of some kv heads of one request against a range of its keys.
#include "kernels/cpu/simd/attention_adjust.h"
#include "kernels/cpu/simd/attention_paths.h"
#include "kernels/cpu/simd/attention_products.h"
#include "kernels/cpu/simd/attention_rows.h"
#include "kernels/cpu/simd/fp8.h"

namespace fovea::kernels::cpu::FOVEA_ISA {
namespace {

// A third of the first cache of today's cores; half of that where a second stream runs before.
constexpr int64_t kBytesAhead = 16 << 10;
constexpr int64_t kBytesFarAhead = 32 << 10;
// Of groups of values after the first one of a tile.
alignas(64) constexpr float kNoDecay[kPadFloats] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};

class ItemRunner {
 public:
  ItemRunner(const AttentionCall& call, const AttentionItem& item, const AttentionScratch& scratch)
      : params_(*call.params),
        item_(item),
        scratch_(scratch),
        shape_(params_, item),
        mask_(mask_view(params_, item.request)),
        adjuster_(params_, item, mask_, scratch.bounds, shape_.group),
        reader_(params_, item.request),
        state_(scratch.states[0]),
        paths_(reader_, shape_),
        token_scales_(params_.keys.page_table &&
                      params_.keys.cache.scale == KvScale::per_token_head),
        ahead_{{reader_, item.head_begin, item.head_end, paths_.group_keys},
               {reader_, item.head_begin, item.head_end, paths_.group_keys},
               {reader_, item.head_begin, item.head_end},
               paths_.by_pairs},
        panel_floats_(static_cast<int64_t>(padded(shape_.dim)) * kPanelKeys),
        row_floats_(padded(shape_.dim) + kPadFloats) {
    for (int32_t n = 0; n < kTileKeys; ++n) {
      k_unpacked_[n] = reinterpret_cast<const char*>(k_bf16() + n * shape_.dim);
    }
    for (int32_t head = 0; head < shape_.heads; ++head) {
      load_queries(params_, item_, shape_, item_.head_begin + head, scratch_.k_rows,
                   scratch_.q + static_cast<int64_t>(head) * shape_.head_rows * padded(shape_.dim));
    }
    for (int32_t r = 0; r < shape_.rows; ++r) {
      const int32_t token = (item_.row_begin + r) / shape_.group;
      scratch_.bounds[r] = row_bounds(mask_, token);
    }
    for (int32_t first = 0; first < shape_.rows; first += kProductRows) {
      blocks_[first / kProductRows] =
          row_block(scratch_.bounds, first, smaller(kProductRows, shape_.rows - first));
    }
    const int32_t products = kTileKeys / kPanelKeys + padded(shape_.dim_v) / kStripColumns;
    const auto lines = static_cast<int32_t>((reader_.k_row_bytes + reader_.v_row_bytes) / 64);
    const bool two_streams = paths_.keys_in_place && !is_fp8(reader_.k_dtype);
    const int64_t near = two_streams ? kBytesAhead / 2 : kBytesAhead;
    rows_near_ = static_cast<int32_t>(near / reader_.k_row_bytes);
    rows_far_ = static_cast<int32_t>(kBytesFarAhead / reader_.k_row_bytes);
    lines_per_ask_ = kTileKeys * lines / (products * blocks()) + 1;
  }

  AttentionState& run() {
    StateTree tree(shape_, scratch_.states + 1);
    start_chunk();
    const int32_t first_tile = item_.kv_begin / kTileKeys * kTileKeys;
    locate(first_tile, later_);
    for (int32_t tile = first_tile; tile < item_.kv_end; tile += kTileKeys) {
      const int32_t next = tile + kTileKeys;
      here_ = later_;
      locate(next, later_);
      attend(tile);
      if (next % kChunkKeys != 0 && next < item_.kv_end) continue;
      end_chunk();
      tree.add(static_cast<uint32_t>(tile / kChunkKeys), state_);
      if (next >= item_.kv_end) return tree.result();
      start_chunk();
    }
    return state_;  // no keys
  }

  const RowShape& shape() const { return shape_; }

 private:
  void start_chunk() {
    clear_state(shape_, state_);
    for (int32_t i = 0; i < shape_.total() * kPadFloats; ++i) scratch_.l_lanes[i] = 0;
  }

  void end_chunk() {
    for (int32_t place = 0; place < shape_.total(); ++place) {
      const F32 lanes = load(scratch_.l_lanes + place * kPadFloats);
      state_.l[place] = hn::GetLane(hn::SumOfLanes(kF32, lanes));
    }
  }

  // Beyond the last tile there are no keys.
  void locate(int32_t tile, TileKeys& to) const {
    reader_.locate(tile, larger(item_.kv_begin - tile, 0), smaller(item_.kv_end - tile, kTileKeys),
                   to);
    if (token_scales_) reader_.ask_for_scales(to, item_.head_begin);
    if (paths_.by_pairs) PagePairsAhead::set_order(to);
  }

  // All rows against one tile. Few rows of many heads meet a group of keys of every head, then the
  // next group, then the values in the same way, so that pages are read as they lie: f32 in groups
  // of 16 instead of 64 gets 0.84 instead of 0.79 of the read bandwidth (2026-11-22), fp8, bound by
  // instructions, 0.68 both ways. Of many rows there is one head.
  void attend(int32_t tile) {
    if (paths_.by_pairs) {
      ahead_.pairs.start(&here_, &later_);
    } else if (paths_.one_block) {
      ahead_.near.start(&here_, &later_, rows_near_);
      ahead_.far.start(&here_, &later_, rows_far_);
    } else {
      ahead_.near.start(&later_, nullptr, 0);
    }
    if (token_scales_) load_token_scales();
    if (!paths_.few_rows) {
      start_keys(0, here_.begin, here_.end);
      start_values(0);
      for (int32_t b = 0; b < blocks(); ++b) {
        const auto [begin, end] = seen_keys(blocks_[b], tile);
        if (begin >= end) continue;
        multiply_keys(blocks_[b], begin, end);
        weigh(tile, blocks_[b], begin, end);
        add(blocks_[b], decay_, begin, end);
      }
      return;
    }
    const int32_t keys = paths_.group_keys;
    for_each_group(keys,
                   [&](int32_t head, int32_t group) { score_group(tile, head, group, keys); });
    const int32_t values = paths_.values_by_group() ? keys : kTileKeys;
    for_each_group(values,
                   [&](int32_t head, int32_t group) { add_group(tile, head, group, values); });
  }

  template <class Function>
  void for_each_group(int32_t keys, const Function& function) {
    for (int32_t group = here_.begin / keys * keys; group < here_.end; group += keys) {
      for (int32_t head = 0; head < shape_.heads; ++head) {
        function(head, group);
        if (paths_.by_pairs) ahead_.pairs.step();
      }
    }
  }

  void score_group(int32_t tile, int32_t head, int32_t group, int32_t keys) {
    const int32_t end = group + keys;
    start_keys(head, larger(group, here_.begin), smaller(end, here_.end));
    for (int32_t b = 0; b < blocks(); ++b) {
      const Range seen = seen_keys(blocks_[b], tile);
      multiply_keys(blocks_[b], larger(group, seen.begin), smaller(end, seen.end));
    }
  }

  void add_group(int32_t tile, int32_t head, int32_t group, int32_t keys) {
    start_values(head);
    for (int32_t b = 0; b < blocks(); ++b) {
      const Range seen = seen_keys(blocks_[b], tile);
      const int32_t begin = larger(group, seen.begin);
      const int32_t end = smaller(group + keys, seen.end);
      if (begin >= end) continue;
      const bool first = begin == seen.begin;
      if (first) weigh(tile, blocks_[b], seen.begin, seen.end);
      add(blocks_[b], first ? decay_ : kNoDecay, begin, end);
    }
  }

  void start_keys(int32_t head, int32_t begin, int32_t end) {
    head_ = head;
    packed_panels_ = 0;
    if (paths_.unpacks_keys) {
      unpack_fp8(reader_.k_dtype, here_.k, this_head() * reader_.k_head_bytes, begin, end,
                 shape_.dim, k_bf16());
    }
  }

  void start_values(int32_t head) {
    head_ = head;
    values_ready_ = false;
  }

  // Of the keys of the tile, then of their values; of all heads, as they lie next to each other.
  void load_token_scales() {
    const KvLayerView& cache = params_.keys.cache;
    const float* v_scale = reader_.v_in_k ? cache.k_scale : cache.v_scale;
    load_scales(here_, cache.k_scale + item_.head_begin, shape_.heads, scratch_.scales);
    load_scales(here_, v_scale + item_.head_begin, shape_.heads,
                scratch_.scales + shape_.heads * kTileKeys);
  }
  const float* k_scales() const { return scratch_.scales + head_ * kTileKeys; }
  const float* v_scales() const { return k_scales() + shape_.heads * kTileKeys; }

  int32_t blocks() const { return (shape_.rows + kProductRows - 1) / kProductRows; }

  int32_t place(const RowBlock& block) const { return head_ * shape_.head_rows + block.first; }

  // Those of few rows wait for the other heads.
  float* scores(const RowBlock& block) const {
    return scratch_.scores + (paths_.few_rows ? place(block) * kTileKeys : 0);
  }

  // Keys of the tile that rows of the block see lie in [begin, end).
  struct Range {
    int32_t begin, end;
  };
  Range seen_keys(const RowBlock& block, int32_t tile) const {
    return {larger(block.begin - tile, here_.begin), smaller(block.end - tile, here_.end)};
  }

  void multiply_keys(const RowBlock& block, int32_t begin, int32_t end) {
    if (begin >= end) return;
    const float* q = scratch_.q + static_cast<int64_t>(place(block)) * padded(shape_.dim);
    const int32_t dim = (shape_.dim + 3) / 4 * 4;
    for (int32_t p = begin / kPanelKeys; p * kPanelKeys < end; ++p) {
      const Range direct = direct_keys(p, begin, end);
      if (direct.begin < direct.end) {
        score_from_cache(block, p, direct);
        continue;
      }
      // With one block of rows a panel is used once, and its place stays in the first cache.
      float* panel = scratch_.k_tile + (paths_.one_block ? 0 : p * panel_floats_);
      if (!(packed_panels_ >> p & 1)) {
        pack_panel(p, dim, panel);
        packed_panels_ |= 1u << p;
      }
      if (!paths_.one_block) ahead_.near.ask<2>(lines_per_ask_);
      const ScoreProduct product = {q, panel, dim, scores(block) + p * kPanelKeys};
      with_product_rows(product_rows(block.rows), product);
    }
  }

  // The keys of a panel around [begin, end) that can be multiplied as they lie, or none.
  Range direct_keys(int32_t p, int32_t begin, int32_t end) const {
    Range keys = {p * kPanelKeys, (p + 1) * kPanelKeys};
    if (reader_.k_dtype == DType::f32) {
      keys.begin = larger(keys.begin, begin / kLanes * kLanes);
      keys.end = smaller(keys.end, (end + kLanes - 1) / kLanes * kLanes);
    }
    const bool direct = paths_.direct && keys.begin >= here_.begin && keys.end <= here_.end;
    return direct ? keys : Range{0, 0};
  }

  Bf16* k_bf16() const { return static_cast<Bf16*>(scratch_.k_unpacked); }
  Bf16* v_bf16() const { return static_cast<Bf16*>(scratch_.v_unpacked); }

  void score_from_cache(const RowBlock& block, int32_t p, Range range) {
    const PanelRows keys = panel_rows(p * kPanelKeys);
    if (paths_.looks_up_keys) {
      score_directly(static_cast<const Fp8ByTable*>(nullptr), block, keys, p, range);
    } else if (reader_.k_dtype == DType::f32) {
      score_directly(static_cast<const float*>(nullptr), block, keys, p, range);
    } else {
      score_directly(static_cast<const Bf16*>(nullptr), block, keys, p, range);
    }
  }

  template <class T>
  void score_directly(const T*, [[maybe_unused]] const RowBlock& block,
                      [[maybe_unused]] const PanelRows& keys, [[maybe_unused]] int32_t p,
                      [[maybe_unused]] Range range) {
#if HWY_TARGET == HWY_AVX3
    DirectScoreProduct<T> product;
    product.q = scratch_.q + static_cast<int64_t>(place(block)) * padded(shape_.dim);
    product.keys = keys;
    product.dim = shape_.dim;
    product.begin = range.begin - p * kPanelKeys;
    product.end = range.end - p * kPanelKeys;
    product.scores = scores(block) + p * kPanelKeys;
    product.fp8_bytes = paths_.looks_up_keys ? &fp8_bytes(reader_.k_dtype) : nullptr;
    with_product_rows(product_rows(block.rows), product);
#endif
  }

  PanelRows panel_rows(int32_t first) {
    PanelRows keys;
    keys.rows = (paths_.unpacks_keys ? k_unpacked_ : here_.k) + first;
    keys.offset = paths_.unpacks_keys ? 0 : this_head() * reader_.k_head_bytes;
    keys.ahead = paths_.one_block ? &ahead_ : nullptr;
    return keys;
  }

  void pack_panel(int32_t p, int32_t dim, float* panel) {
    const int32_t first = p * kPanelKeys;
    if (paths_.keys_in_place && first >= here_.begin && first + kPanelKeys <= here_.end) {
      return pack_from_cache(first, panel);
    }
    float* rows = scratch_.k_rows + (paths_.values_in_k_rows ? first * row_floats_ : 0);
    const auto row_lines = static_cast<int32_t>((reader_.k_row_bytes + 63) / 64);
    for (int32_t n = 0; n < kPanelKeys; ++n) {
      if (paths_.one_block) ahead_.near.ask<3>(row_lines);
      float* to = rows + n * row_floats_;
      if (first + n < here_.begin || first + n >= here_.end) {
        for (int32_t d = 0; d < padded(shape_.dim); d += kLanes) store(hn::Zero(kF32), to + d);
        continue;
      }
      const char* from = here_.k[first + n] + this_head() * reader_.k_head_bytes;
      if (reader_.fp8_rows) {
        load_mla_fp8_row(from, to);
      } else {
        load_any_row(from, reader_.k_dtype, shape_.dim, to);
      }
    }
    transpose_panel(rows, row_floats_, dim, panel);
  }

  void pack_from_cache(int32_t first, float* panel) {
    const PanelRows keys = panel_rows(first);
    if (reader_.k_dtype == DType::f32) {
      transpose_from_cache(static_cast<const float*>(nullptr), keys, shape_.dim, panel);
    } else {
      transpose_from_cache(static_cast<const Bf16*>(nullptr), keys, shape_.dim, panel);
    }
  }

  int64_t this_head() const { return item_.head_begin + head_; }

  // Turns the block's products with the keys [begin, end) into weights, and sets decay_.
  void weigh(int32_t tile, const RowBlock& block, int32_t begin, int32_t end) {
    factor_ = score_factor(params_, item_.head_begin + head_);
    const KeysOfHead keys = {tile,        here_.begin, here_.end,
                             this_head(), factor_,     token_scales_ ? k_scales() : nullptr};
    adjuster_.adjust(block, keys, begin, end, scores(block));
    SoftmaxTile softmax;
    softmax.scores = scores(block);
    softmax.begin = begin / kLanes;
    softmax.end = (end + kLanes - 1) / kLanes;
    softmax.rows = block.rows;
    softmax.factor = params_.logit_cap > 0 || params_.alibi_slopes ? 1.0f : factor_;
    softmax.v_scales = token_scales_ ? v_scales() : nullptr;
    softmax.m = state_.m + place(block);
    softmax.l_lanes = scratch_.l_lanes + place(block) * kPadFloats;
    softmax.decay = decay_;
    softmax_tile(softmax);
  }

  // Adds the weighted values of keys [begin, end) to o, times decay.
  void add(const RowBlock& block, const float* decay, int32_t begin, int32_t end) {
    if (!values_ready_) prepare_values();
#if HWY_TARGET == HWY_AVX3
    if (paths_.looks_up_values) {
      return add_values(static_cast<const Fp8ByTable*>(nullptr), block, decay, begin, end);
    }
#endif
    if (paths_.unpacks_values || (paths_.values_in_place && reader_.v_dtype == DType::bf16)) {
      add_values(static_cast<const Bf16*>(nullptr), block, decay, begin, end);
    } else if (paths_.values_in_place && reader_.v_dtype == DType::f16) {
      add_values(static_cast<const F16*>(nullptr), block, decay, begin, end);
    } else if (paths_.values_in_place) {
      add_values(static_cast<const float*>(nullptr), block, decay, begin, end);
    } else if (paths_.values_in_k_rows) {
      add_values(static_cast<const float*>(nullptr), block, decay, begin, end);
    } else {
      add_strips(block, decay, begin, end);
    }
  }

  // Where the values of the tile are read from: the cache, the unpacked K rows, or strips.
  void prepare_values() {
    values_ready_ = true;
    if (paths_.values_in_place && !paths_.unpacks_values) return;
    if (paths_.unpacks_values) {
      unpack_fp8(reader_.v_dtype, here_.v, this_head() * reader_.v_head_bytes, here_.begin,
                 here_.end, shape_.dim_v, v_bf16());
      for (int32_t n = here_.begin; n < here_.end; ++n) {
        values_[n] = reinterpret_cast<const char*>(v_bf16() + n * shape_.dim_v);
      }
      return;
    }
    for (int32_t n = here_.begin; n < here_.end; ++n) {
      if (paths_.values_in_k_rows) {
        values_[n] = reinterpret_cast<const char*>(scratch_.k_rows + n * row_floats_);
      } else {
        const char* from = here_.v[n] + this_head() * reader_.v_head_bytes;
        with_type(from, reader_.v_dtype, [&](const auto* typed) {
          load_into_strips(typed, shape_.dim_v, n, scratch_.v_strips);
        });
      }
    }
  }

  void add_strips(const RowBlock& block, const float* decay, int32_t begin, int32_t end) {
    StripProduct product;
    product.weights = scores(block);
    product.strip = scratch_.v_strips;
    product.decay = decay;
    product.begin = begin;
    product.end = end;
    product.o = state_.o + static_cast<int64_t>(place(block)) * shape_.o_stride;
    product.o_stride = shape_.o_stride;
    for (product.columns = padded(shape_.dim_v); product.columns > 0;
         product.columns -= kStripColumns) {
      if (!paths_.one_block) ahead_.near.ask<2>(lines_per_ask_);
      with_product_rows(product_rows(block.rows), product);
      product.strip += kStripFloats;
      product.o += kStripColumns;
    }
  }

  template <class T>
  HWY_INLINE void add_values(const T*, const RowBlock& block, const float* decay, int32_t begin,
                             int32_t end) {
    ValueProduct<T> product;
    product.weights = scores(block);
    const bool in_place = paths_.values_in_place && !paths_.unpacks_values;
    product.values = in_place ? here_.v : values_;
    product.offset = in_place ? this_head() * reader_.v_head_bytes : 0;
    product.decay = decay;
    product.begin = begin;
    product.end = end;
    product.width = (shape_.dim_v + kLanes - 1) / kLanes * kLanes;
    product.o = state_.o + static_cast<int64_t>(place(block)) * shape_.o_stride;
    product.o_stride = shape_.o_stride;
    product.fp8_bytes = paths_.looks_up_values ? &fp8_bytes(reader_.v_dtype) : nullptr;
    product.ahead = paths_.one_block && reader_.v_row_bytes > 0 ? &ahead_ : nullptr;
    with_product_rows(product_rows(block.rows), product);
  }

  const AttentionParams& params_;
  const AttentionItem& item_;
  const AttentionScratch& scratch_;
  const RowShape shape_;
  const MaskView mask_;
  ScoreAdjuster adjuster_;
  const KeyReader reader_;
  AttentionState& state_;
  const ItemPaths paths_;
  const bool token_scales_;
  LinesOfFewRows ahead_;
  const int64_t panel_floats_;
  const int64_t row_floats_;
  int32_t rows_near_, rows_far_, lines_per_ask_;

  RowBlock blocks_[kMostRows / kProductRows];

  // The tile and head at work.
  TileKeys here_, later_;
  int32_t head_ = 0;
  float factor_ = 0;
  uint32_t packed_panels_ = 0;
  bool values_ready_ = false;
  alignas(64) float decay_[kPadFloats];
  const char* values_[kTileKeys];
  const char* k_unpacked_[kTileKeys];
};

}  // namespace

void attention_item(const AttentionCall& call, const AttentionItem& item,
                    const AttentionScratch& scratch) {
  ItemRunner runner(call, item, scratch);
  const AttentionState& state = runner.run();
  const RowShape& shape = runner.shape();
  if (item.partial < 0) {
    write_rows(*call.params, item, shape, state);
    return;
  }
  const AttentionState to = partial_state(call, shape, item.partial);
  const size_t rows = static_cast<size_t>(shape.total());
  memcpy(to.o, state.o, rows * shape.o_stride * sizeof(float));
  memcpy(to.m, state.m, rows * sizeof(float));
  memcpy(to.l, state.l, rows * sizeof(float));
}

void attention_merge(const AttentionCall& call, const AttentionMerge& merge) {
  constexpr int32_t kLevels = 33;
  const RowShape shape(*call.params, merge.tile);
  AttentionState states[kLevels] = {};
  StateTree tree(shape, states);
  for (int32_t piece = 0; piece < merge.pieces; ++piece) {
    AttentionState state =
        partial_state(call, shape, merge.tile.partial + piece * merge.partial_stride);
    tree.add(static_cast<uint32_t>(merge.first_piece + piece), state);
  }
  write_rows(*call.params, merge.tile, shape, tree.result());
}

}  // namespace fovea::kernels::cpu::FOVEA_ISA
