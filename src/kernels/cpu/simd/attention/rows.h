// SPDX-License-Identifier: Apache-2.0
// Loading the queries of an item and writing its results.
#pragma once

#include "kernels/cpu/simd/attention/kv_scales.h"
#include "kernels/cpu/simd/attention/states.h"
#include "kernels/cpu/simd/attention/transpose.h"

namespace fovea::kernels::cpu::FOVEA_ISA {
namespace {

// Where a row is in q and out.
struct QueryRow {
  int64_t token, q_head;
};

// Returns row r of one kv head of an item.
inline QueryRow query_row(const AttentionParams& params, const AttentionItem& work,
                          const ItemShape& shape, int32_t kv_head, int32_t r) {
  const int32_t row = work.row_begin + r;
  return {params.q_indptr[work.request] + row / shape.group,
          kv_head * shape.group + row % shape.group};
}

// Prefetches a row of q or out. Rows are prefetched one block ahead.
template <bool kToWrite>
HWY_INLINE void prefetch_row(const HeadRows& rows, QueryRow at, int32_t dim) {
  const char* row = head_row(rows, at.token, at.q_head);
  const int64_t bytes = dim * element_bytes(rows.dtype);
  for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(row + byte, kToWrite, 3);
}

// The queries of one kv head of an item.
class HeadQueries {
 public:
  HeadQueries(const AttentionParams& params, const AttentionItem& work, const ItemShape& shape,
              int32_t kv_head)
      : params_(params),
        work_(work),
        shape_(shape),
        kv_head_(kv_head),
        dim_(padded(shape.dim)),
        front_(params.q_rope.data ? params.q_split_dim : params.head_dim) {}

  // Loads row blocks: element d of row r of a block of R rows goes to its block + d * R + r. `rows`
  // is scratch for kProductRows rows.
  void load_row_blocks(float* rows, float* q) const {
    for (int32_t first = 0; first < shape_.rows; first += kProductRows) {
      const int32_t count = product_rows(smaller(kProductRows, shape_.rows - first));
      load_rows(first, count, rows);
      interleave_rows(rows, row_floats(), count, dim_, count,
                      q + static_cast<int64_t>(first) * dim_);
    }
  }

  // Loads lane blocks, which consist of whole vectors of rows. `rows` is scratch for kLanes rows.
  void load_lane_blocks(float* rows, float* q) const {
    for (int32_t first = 0; first < shape_.rows; first += kLanes) {
      load_rows(first, kLanes, rows);
      const int32_t block = first / kLaneRows * kLaneRows;
      const int32_t width = lane_vectors(smaller(kLaneRows, shape_.rows - block)) * kLanes;
      interleave_rows(rows, row_floats(), kLanes, dim_, width,
                      q + static_cast<int64_t>(block) * dim_ + first - block);
    }
  }

 private:
  QueryRow row(int32_t r) const { return query_row(params_, work_, shape_, kv_head_, r); }
  int64_t row_floats() const { return dim_ + kPadFloats; }

  // Loads queries [first, first + count) as rows, zeros where there are none.
  void load_rows(int32_t first, int32_t count, float* rows) const {
    for (int32_t i = 0; i < count; ++i) {
      const int32_t r = first + i;
      if (r >= shape_.rows) {
        memset(rows + i * row_floats(), 0, static_cast<size_t>(dim_) * sizeof(float));
        continue;
      }
      load_row_f32(row(r), rows + i * row_floats());
      if (r + count < shape_.rows) prefetch_row<false>(params_.q, row(r + count), front_);
    }
  }

  // Loads one query as f32, padded with zeros.
  void load_row_f32(QueryRow at, float* to) const {
    load_any_row(head_row(params_.q, at.token, at.q_head), params_.q.dtype, front_, to);
    if (front_ == params_.head_dim) return;
    load_any_row(head_row(params_.q_rope, at.token, at.q_head), params_.q_rope.dtype,
                 params_.head_dim - front_, to + front_);
  }

  const AttentionParams& params_;
  const AttentionItem& work_;
  const ItemShape& shape_;
  const int32_t kv_head_;
  const int32_t dim_;    // padded
  const int32_t front_;  // dims of a query that are in params.q; the others are in q_rope
};

// Turns o of a lane block, which lies column by column, into rows.
inline void columns_to_rows(const float* columns, int32_t rows, int32_t o_stride, float* o) {
  const int32_t width = lane_vectors(rows) * kLanes;
  for (int32_t column = 0; column < o_stride; column += kLanes) {
    interleave_rows(columns + column * width, width, kLanes, width, o_stride, o + column);
  }
}

// Returns the factor that divides o by the sum of weights, the sink included.
inline float output_factor(const AttentionParams& params, int64_t q_head, float m, float l) {
  if (!params.sinks) return 1.0f / l;
  const float sink = params.sinks[q_head] * kLog2E;
  const float top = sink > m ? sink : m;
  const float weight = exp2_non_positive(m - top);
  // A sink of +inf takes all the weight.
  return sink == kInfinity ? 0.0f : weight / (l * weight + exp2_non_positive(sink - top));
}

// Divides the state rows [first, last) by their sums and writes out and lse. `state` starts at
// `first`.
inline void write_rows(const AttentionParams& params, const AttentionItem& work,
                       const ItemShape& shape, int32_t first, int32_t last,
                       const RowStates& state) {
  const KvLayerView& cache = params.keys.cache;
  for (int32_t i = 0; i < last - first; ++i) {
    const int32_t r = (first + i) % shape.head_rows;
    if (r >= shape.rows) continue;
    const int32_t kv_head = work.head_begin + (first + i) / shape.head_rows;
    const auto [token, q_head] = query_row(params, work, shape, kv_head, r);
    if (r + kProductRows < shape.rows) {
      const QueryRow later = query_row(params, work, shape, kv_head, r + kProductRows);
      prefetch_row<true>(params.out, later, shape.dim_v);
    }
    const float m = state.m[i];
    const float l = state.l[i];
    const bool empty = m == -kInfinity && l == 0;  // with l != 0 all scores are NaN
    float factor = empty ? 0.0f : output_factor(params, q_head, m, l);
    if (params.keys.page_table) {
      const bool v_in_k = cache.layout != KvLayout::mha;
      factor *= tensor_scale(cache, v_in_k ? cache.k_scale : cache.v_scale, kv_head);
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

}  // namespace
}  // namespace fovea::kernels::cpu::FOVEA_ISA
