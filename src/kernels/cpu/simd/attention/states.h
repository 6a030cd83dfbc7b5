// SPDX-License-Identifier: Apache-2.0
// States of rows (o, maximum, sum) and how the states of chunks are merged.
#pragma once

#include "kernels/cpu/simd/attention/blocks.h"
#include "kernels/cpu/simd/attention/modes.h"
#include "kernels/cpu/simd/exponentials.h"

namespace fovea::kernels::cpu::FOVEA_ISA {
namespace {

// Returns the states from state row `row` on.
inline RowStates states_from(const ItemShape& shape, const RowStates& states, int32_t row) {
  return {states.o + int64_t{row} * shape.o_stride, states.m + row, states.l + row};
}

inline void clear_o(int32_t rows, int32_t o_stride, float* o) {
  const int64_t size = int64_t{rows} * o_stride;
  for (int64_t i = 0; i < size; i += kLanes) store(hn::Zero(kF32), o + i);
}

inline void clear_sums(int32_t rows, const RowStates& state) {
  for (int32_t r = 0; r < rows; ++r) {
    state.m[r] = -kInfinity;
    state.l[r] = 0;
  }
}

// Merges `earlier` into `later`. An empty state leaves the bits of the other one.
inline void merge_states(const ItemShape& shape, const RowStates& earlier, const RowStates& later) {
  for (int32_t r = 0; r < shape.state_rows(); ++r) {
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

// Does the same for a lane block, whose o lies column by column.
struct LaneMerge {
  RowStates earlier, later;  // states of the block
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

inline void merge_lane_block(const ItemShape& shape, int32_t first, const RowStates& earlier,
                             const RowStates& later) {
  const LaneMerge merge = {states_from(shape, earlier, first), states_from(shape, later, first),
                           shape.o_stride};
  with_lane_vectors(lane_vectors(smaller(kLaneRows, shape.rows - first)), merge);
}

inline void merge_lane_states(const ItemShape& shape, const RowStates& earlier,
                              const RowStates& later) {
  for (int32_t row = 0; row < shape.rows; row += kLaneRows) {
    merge_lane_block(shape, row, earlier, later);
  }
}

// Merges states, added in ascending order of their numbers, along a binary tree over these numbers.
// `states` has an entry for each level. Missing numbers count as empty, so a tree over pieces of
// aligned size gives the bits of a tree over the chunks.
class StateTree {
 public:
  using Merge = void (*)(const ItemShape&, const RowStates& earlier, const RowStates& later);

  StateTree(const ItemShape& shape, RowStates* states, Merge merge = merge_states)
      : shape_(shape), states_(states), merge_(merge) {}

  // Takes `state` and leaves the memory of a merged one in its place.
  void add(uint32_t number, RowStates& state) {
    for_each_sibling(number, [&](const RowStates& earlier) { merge_(shape_, earlier, state); });
    add_merged(number, state);
  }

  // Calls function(earlier) for each state to merge into state `number` before add_merged().
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

  // Returns the merged state. At least one state was added.
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

  const ItemShape& shape_;
  RowStates* states_;
  const Merge merge_;
  uint32_t held_ = 0;
};

// Returns the states of the item within its partial result.
inline RowStates partial_state(const AttentionCall& call, const ItemShape& shape,
                               const AttentionItem& item) {
  const int32_t rows = item.partial_heads * shape.head_rows;
  RowStates state;
  state.o = call.partials + item.partial;
  state.m = state.o + int64_t{rows} * shape.o_stride;
  state.l = state.m + rows;
  return states_from(shape, state, (item.head_begin - item.partial_head) * shape.head_rows);
}

}  // namespace
}  // namespace fovea::kernels::cpu::FOVEA_ISA
