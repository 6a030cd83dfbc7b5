// SPDX-License-Identifier: Apache-2.0
// The rows of an item: loading queries, cutting rows into blocks, states and their merging, and
// writing results.
#pragma once

#include <math.h>

#include "kernels/cpu/simd/attention_keys.h"
#include "kernels/cpu/simd/attention_scores.h"
#include "kernels/cpu/simd/attention_softmax.h"
#include "kernels/cpu/simd/attention_wide.h"
#include "kernels/cpu/simd/attention_work.h"

namespace fovea::kernels::cpu::FOVEA_ISA {
namespace {

constexpr float kInfinity = HUGE_VALF;

// The shape of an item. Rows of one head take head_rows places: whole blocks, the last one rounded
// up to a size the products have.
struct RowShape {
  RowShape(const AttentionParams& params, const AttentionItem& item)
      : group(params.q_heads / params.kv_heads),
        heads(item.head_end - item.head_begin),
        rows(item.row_end - item.row_begin),
        head_rows(rows / kProductRows * kProductRows + product_rows(rows % kProductRows)),
        dim(params.head_dim),
        dim_v(params.head_dim_v),
        o_stride(padded(params.head_dim_v)) {}

  int32_t total() const { return heads * head_rows; }

  int32_t group;
  int32_t heads;
  int32_t rows;
  int32_t head_rows;
  int32_t dim, dim_v;
  int32_t o_stride;
};

// The states from row `row` of an item on.
inline RowStates states_from(const RowShape& shape, const RowStates& states, int32_t row) {
  return {states.o + int64_t{row} * shape.o_stride, states.m + row, states.l + row};
}

inline void clear_o(int32_t places, int32_t o_stride, float* o) {
  const int64_t size = int64_t{places} * o_stride;
  for (int64_t i = 0; i < size; i += kLanes) store(hn::Zero(kF32), o + i);
}

inline void clear_sums(int32_t places, const RowStates& state) {
  for (int32_t r = 0; r < places; ++r) {
    state.m[r] = -kInfinity;
    state.l[r] = 0;
  }
}

// later = earlier merged with later. An empty state leaves the other one bit for bit.
inline void merge_states(const RowShape& shape, const RowStates& earlier, const RowStates& later) {
  for (int32_t r = 0; r < shape.total(); ++r) {
    const float m = earlier.m[r] > later.m[r] ? earlier.m[r] : later.m[r];
    const float finite = m == -kInfinity ? 0.0f : m;
    const float earlier_weight = exp2_non_positive(earlier.m[r] - finite);
    const float later_weight = exp2_non_positive(later.m[r] - finite);
    later.m[r] = m;
    later.l[r] = earlier.l[r] * earlier_weight + later.l[r] * later_weight;
    const float* from = earlier.o + static_cast<int64_t>(r) * shape.o_stride;
    float* to = later.o + static_cast<int64_t>(r) * shape.o_stride;
    for (int32_t d = 0; d < shape.o_stride; d += kLanes) {
      const F32 scaled = hn::Mul(load(from + d), hn::Set(kF32, earlier_weight));
      store(hn::MulAdd(load(to + d), hn::Set(kF32, later_weight), scaled), to + d);
    }
  }
}

// The same for a block of attention_wide.h, whose o lies column by column.
struct WideMerge {
  RowStates earlier, later;  // of the block
  int32_t o_stride;

  template <int V>
  void run() const {
    F32 earlier_weight[V], later_weight[V];
    for (int v = 0; v < V; ++v) {
      const F32 earlier_m = load(earlier.m + v * kLanes);
      const F32 later_m = load(later.m + v * kLanes);
      const F32 m = hn::IfThenElse(hn::Gt(earlier_m, later_m), earlier_m, later_m);
      const F32 finite = hn::IfThenZeroElse(hn::Eq(m, hn::Set(kF32, -kInfinity)), m);
      earlier_weight[v] = exp2_non_positive(hn::Sub(earlier_m, finite));
      later_weight[v] = exp2_non_positive(hn::Sub(later_m, finite));
      const F32 earlier_l = hn::Mul(load(earlier.l + v * kLanes), earlier_weight[v]);
      const F32 later_l = hn::Mul(load(later.l + v * kLanes), later_weight[v]);
      store(m, later.m + v * kLanes);
      store(hn::Add(earlier_l, later_l), later.l + v * kLanes);
    }
    const float* from = earlier.o;
    float* to = later.o;
    for (int32_t column = 0; column < o_stride; ++column) {
      for (int v = 0; v < V; ++v, from += kLanes, to += kLanes) {
        const F32 scaled = hn::Mul(load(from), earlier_weight[v]);
        store(hn::MulAdd(load(to), later_weight[v], scaled), to);
      }
    }
  }
};

inline void merge_wide_block(const RowShape& shape, int32_t first, const RowStates& earlier,
                             const RowStates& later) {
  const WideMerge merge = {states_from(shape, earlier, first), states_from(shape, later, first),
                           shape.o_stride};
  with_wide_vectors(wide_vectors(smaller(kWideRows, shape.rows - first)), merge);
}

inline void merge_wide_states(const RowShape& shape, const RowStates& earlier,
                              const RowStates& later) {
  for (int32_t row = 0; row < shape.rows; row += kWideRows) {
    merge_wide_block(shape, row, earlier, later);
  }
}

// Merges states along a binary tree over their numbers, arriving in ascending order; `states` holds
// one place per level. Missing numbers count as empty, so a tree over pieces of aligned size equals
// the tree over their parts.
class StateTree {
 public:
  using Merge = void (*)(const RowShape&, const RowStates& earlier, const RowStates& later);

  StateTree(const RowShape& shape, RowStates* states, Merge merge = merge_states)
      : shape_(shape), states_(states), merge_(merge) {}

  // Takes `state` and leaves the memory of a consumed one in its place.
  void add(uint32_t number, RowStates& state) {
    for_each_sibling(number, [&](const RowStates& earlier) { merge_(shape_, earlier, state); });
    add_merged(number, state);
  }

  // The states that state `number` must be merged with before add_merged(), in this order.
  template <class Function>
  void for_each_sibling(uint32_t number, const Function& function) const {
    for (int32_t level = 0; (number >> level) & 1; ++level) {
      if (held_ >> level & 1) function(states_[level]);
    }
  }

  void add_merged(uint32_t number, RowStates& state) {
    int32_t level = 0;
    for (; (number >> level) & 1; ++level) held_ &= ~(1u << level);
    swap(states_[level], state);
    held_ |= 1u << level;
  }

  // The whole. At least one state was added.
  RowStates& result() {
    RowStates* sum = nullptr;
    for (int32_t level = 0; held_ >> level; ++level) {
      if (!(held_ >> level & 1)) continue;
      if (sum) {
        merge_(shape_, states_[level], *sum);
      } else {
        sum = &states_[level];
      }
    }
    return *sum;
  }

 private:
  static void swap(RowStates& a, RowStates& b) {
    const RowStates old = a;
    a = b;
    b = old;
  }

  const RowShape& shape_;
  RowStates* states_;
  const Merge merge_;
  uint32_t held_ = 0;
};

inline float tensor_scale(const KvLayerView& cache, const float* scales, int32_t head) {
  if (cache.scale == KvScale::per_tensor) return scales[0];
  return cache.scale == KvScale::per_head ? scales[head] : 1.0f;
}

// What scores of one kv head are multiplied by: the softmax scale, log2(e), and the scale of K.
inline float score_factor(const AttentionParams& params, int32_t head) {
  const KvLayerView& cache = params.keys.cache;
  const float k_scale = params.keys.page_table ? tensor_scale(cache, cache.k_scale, head) : 1.0f;
  return params.scale * k_scale * kLog2E;
}

// Where row r of one kv head of an item is in q and out.
struct RowPlace {
  int64_t token, q_head;
};

inline RowPlace row_place(const AttentionParams& params, const AttentionItem& item,
                          const RowShape& shape, int32_t head, int32_t r) {
  const int32_t row = item.row_begin + r;
  return {params.q_indptr[item.request] + row / shape.group,
          head * shape.group + row % shape.group};
}

// Rows of q and out are in memory. Asked for one block ahead they cost 2 % less of a prefill of
// 2048 (2026-11-22).
template <bool kToWrite>
HWY_INLINE void ask_for_row(const HeadRows& rows, RowPlace place, int32_t dim) {
  const char* row = head_row(rows, place.token, place.q_head);
  const int64_t bytes = dim * element_bytes(rows.dtype);
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(row + at, kToWrite, 3);
}

// Dims of a query that are in params.q.
inline int32_t front_dims(const AttentionParams& params) {
  return params.q_rope.data ? params.q_split_dim : params.head_dim;
}

// One query row as f32, padded with zeros.
inline void load_query(const AttentionParams& params, RowPlace place, float* row) {
  const auto [token, q_head] = place;
  const int32_t front = front_dims(params);
  load_any_row(head_row(params.q, token, q_head), params.q.dtype, front, row);
  if (front == params.head_dim) return;
  load_any_row(head_row(params.q_rope, token, q_head), params.q_rope.dtype, params.head_dim - front,
               row + front);
}

// block[d * width + r] = rows[r][d] for r < count <= kLanes; rows are `stride` floats apart.
inline void interleave_rows(const float* rows, int64_t stride, int32_t count, int32_t dim,
                            int32_t width, float* block) {
  const auto lanes = hn::FirstN(kF32, static_cast<size_t>(count));
  for (int32_t d = 0; d < dim; d += kLanes) {
    F32 blocks[kLanes / 4][4];
    for (int32_t g = 0; g < kLanes / 4; ++g) {
      F32 four[4];
      for (int32_t j = 0; j < 4; ++j) {
        const int32_t r = 4 * g + j;
        four[j] = r < count ? load(rows + r * stride + d) : hn::Zero(kF32);
      }
      transpose_blocks(four, blocks[g]);
    }
    F32 dims[kLanes];
    gather_blocks(blocks, dims);
    for (int32_t i = 0; i < kLanes; ++i) {
      hn::BlendedStore(dims[i], lanes, kF32, block + (d + i) * width);
    }
  }
}

// Queries [first, first + count) of one kv head as rows, zeros where there are none.
inline void load_rows(const AttentionParams& params, const AttentionItem& item,
                      const RowShape& shape, int32_t head, int32_t first, int32_t count,
                      float* rows) {
  const int64_t stride = padded(shape.dim) + kPadFloats;
  const int32_t front = front_dims(params);
  for (int32_t i = 0; i < count; ++i) {
    const int32_t r = first + i;
    if (r >= shape.rows) {
      memset(rows + i * stride, 0, static_cast<size_t>(padded(shape.dim)) * sizeof(float));
      continue;
    }
    load_query(params, row_place(params, item, shape, head, r), rows + i * stride);
    if (r + count >= shape.rows) continue;
    ask_for_row<false>(params.q, row_place(params, item, shape, head, r + count), front);
  }
}

// The queries of one kv head. Element d of row r of a block of R rows is at block + d * R + r.
// `rows` is scratch for kProductRows rows.
inline void load_queries(const AttentionParams& params, const AttentionItem& item,
                         const RowShape& shape, int32_t head, float* rows, float* q) {
  const int32_t dim = padded(shape.dim);
  for (int32_t first = 0; first < shape.rows; first += kProductRows) {
    const int32_t count = product_rows(smaller(kProductRows, shape.rows - first));
    load_rows(params, item, shape, head, first, count, rows);
    interleave_rows(rows, dim + kPadFloats, count, dim, count,
                    q + static_cast<int64_t>(first) * dim);
  }
}

// The same for blocks of whole vectors of rows, at most kWideRows; scratch for kLanes rows.
inline void load_wide_queries(const AttentionParams& params, const AttentionItem& item,
                              const RowShape& shape, int32_t head, float* rows, float* q) {
  const int32_t dim = padded(shape.dim);
  for (int32_t first = 0; first < shape.rows; first += kLanes) {
    load_rows(params, item, shape, head, first, kLanes, rows);
    const int32_t block = first / kWideRows * kWideRows;
    const int32_t width = wide_vectors(smaller(kWideRows, shape.rows - block)) * kLanes;
    interleave_rows(rows, dim + kPadFloats, kLanes, dim, width,
                    q + static_cast<int64_t>(block) * dim + first - block);
  }
}

// Rows of o of a block of attention_wide.h, which lies column by column.
inline void columns_to_rows(const float* columns, int32_t rows, int32_t o_stride, float* o) {
  const int32_t width = wide_vectors(rows) * kLanes;
  for (int32_t column = 0; column < o_stride; column += kLanes) {
    interleave_rows(columns + column * width, width, kLanes, width, o_stride, o + column);
  }
}

// Divides by the sum, the sink included, and writes out and lse. state: of the places from `first`
// on.
inline void write_rows(const AttentionParams& params, const AttentionItem& item,
                       const RowShape& shape, int32_t first, int32_t last, const RowStates& state) {
  const KvLayerView& cache = params.keys.cache;
  for (int32_t i = 0; i < last - first; ++i) {
    const int32_t place = first + i;
    const int32_t r = place % shape.head_rows;
    if (r >= shape.rows) continue;
    const int32_t head = item.head_begin + place / shape.head_rows;
    const auto [token, q_head] = row_place(params, item, shape, head, r);
    if (r + kProductRows < shape.rows) {
      const RowPlace later = row_place(params, item, shape, head, r + kProductRows);
      ask_for_row<true>(params.out, later, shape.dim_v);
    }
    const float m = state.m[i];
    const float l = state.l[i];
    const bool empty = m == -kInfinity && l == 0;  // else all scores are NaN
    float factor = empty ? 0.0f : 1.0f / l;
    if (!empty && params.sinks) {
      const float sink = params.sinks[q_head] * kLog2E;
      const float top = sink > m ? sink : m;
      const float weight = exp2_non_positive(m - top);
      // A sink of +inf takes everything.
      factor = sink == kInfinity ? 0.0f : weight / (l * weight + exp2_non_positive(sink - top));
    }
    if (params.keys.page_table) {
      const bool v_in_k = cache.layout != KvLayout::mha;
      factor *= tensor_scale(cache, v_in_k ? cache.k_scale : cache.v_scale, head);
    }
    float* o = state.o + static_cast<int64_t>(i) * shape.o_stride;
    for (int32_t d = 0; d < shape.o_stride; d += kLanes) {
      store(hn::Mul(load(o + d), hn::Set(kF32, factor)), o + d);
    }
    char* out = const_cast<char*>(head_row(params.out, token, q_head));
    store_any_row(o, shape.dim_v, params.out.dtype, out);
    if (params.lse) {
      const double lse =
          static_cast<double>(m) * 0.693147180559945309417 + log(static_cast<double>(l));
      params.lse[token * params.q_heads + q_head] = empty ? -kInfinity : static_cast<float>(lse);
    }
  }
}

// Where the item's part of a partial result lies.
inline RowStates partial_state(const AttentionCall& call, const RowShape& shape,
                               const AttentionItem& item) {
  const int32_t places = item.partial_heads * shape.head_rows;
  RowStates state;
  state.o = call.partials + item.partial;
  state.m = state.o + int64_t{places} * shape.o_stride;
  state.l = state.m + places;
  return states_from(shape, state, (item.head_begin - item.partial_head) * shape.head_rows);
}

}  // namespace
}  // namespace fovea::kernels::cpu::FOVEA_ISA
