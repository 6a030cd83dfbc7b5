// SPDX-License-Identifier: Apache-2.0
// Blocks of rows, and the sizes of the register tiles that compute them.
//
// Row blocks have the keys, or the columns of values, in the lanes of vectors and broadcast the
// rows. Lane blocks (lane_blocks.h) have the rows in the lanes and broadcast the keys.
//
// Each element of a product is one chain of fused multiply-adds in ascending order of the summed
// index, whatever the size of the tile and whichever kind of block. So a row has the same bits in a
// decode step of one row and in the middle of a prefill.
//
// Every loop over sums of a register tile asks to be unrolled. GCC would otherwise move all sums
// through the stack before and after the product (2026-11-22: 4 % of a prefill).
#pragma once

#include "kernels/cpu/simd/attention/work.h"
#include "kernels/cpu/simd/convert.h"

namespace fovea::kernels::cpu::FOVEA_ISA {
namespace {

// A row block: 12 x 2 accumulators of 32 registers, or 6 x 2 of 16.
constexpr int32_t kProductRows = kLanes == 16 ? 12 : 6;
constexpr int32_t kPanelKeys = 2 * kLanes;
static_assert(kTileKeys % kPanelKeys == 0 && kBlockRows % kProductRows == 0);

// Up to this many rows, keys are multiplied as they are transposed: the sums of 8 rows take 16 of
// 32 registers, the keys of a step the others. 16 registers are too few.
constexpr int32_t kFusedRows = HWY_TARGET == HWY_AVX3 ? 8 : 0;

// A lane block: 3 vectors of rows by as many keys as there are accumulators for.
constexpr int32_t kLaneRows = 3 * kLanes;
constexpr int32_t kLaneKeys = kLanes / 2;
static_assert(kLaneRows % kProductRows == 0 && kLaneRows <= kLaneBlockRows);

// Returns the rows of the smallest product that covers `rows` <= kProductRows.
inline int32_t product_rows(int32_t rows) {
  if (rows <= 2) return rows;
  if (rows <= 4) return 4;
  if (kProductRows == 6) return 6;
  return rows <= 8 ? 8 : 12;
}

// Calls function.run<R>() with R = rows, one of product_rows().
template <class Function>
HWY_INLINE void with_product_rows(int32_t rows, const Function& function) {
  switch (rows) {
    case 1:
      return function.template run<1>();
    case 2:
      return function.template run<2>();
    case 4:
      return function.template run<4>();
    case 8:
      if constexpr (kProductRows > 8) return function.template run<8>();
      [[fallthrough]];
    default:
      return function.template run<kProductRows>();
  }
}

// Returns how many vectors `rows` <= kLaneRows fill.
inline int32_t lane_vectors(int32_t rows) { return (rows + kLanes - 1) / kLanes; }

// Calls function.run<V>() with V = vectors.
template <class Function>
HWY_INLINE void with_lane_vectors(int32_t vectors, const Function& function) {
  if (vectors == 1) return function.template run<1>();
  if (vectors == 2) return function.template run<2>();
  function.template run<3>();
}

// [begin, end)
struct Range {
  int32_t begin, end;
};

// Returns the smallest range of whole vectors that covers `elements`.
inline Range whole_vectors(Range elements) {
  return {elements.begin / kLanes * kLanes, (elements.end + kLanes - 1) / kLanes * kLanes};
}

// Consecutive rows of a head: at most kProductRows, or kLaneRows in a lane block.
struct RowBlock {
  int32_t first;  // index of the first row within the head
  int32_t rows;
  Range keys;               // contains every key that some row sees
  Range inner;              // every row sees all of these keys
  int32_t predicate_begin;  // the smallest of its rows
};

// `bounds` holds all rows of the head.
inline RowBlock row_block(const RowBounds* bounds, int32_t first, int32_t rows) {
  RowBlock block;
  block.first = first;
  block.rows = rows;
  block.keys.begin = block.inner.end = INT32_MAX;
  block.keys.end = block.inner.begin = 0;
  block.predicate_begin = INT32_MAX;
  for (int32_t r = first; r < first + rows; ++r) {
    const RowBounds& row = bounds[r];
    const bool prefix = row.prefix_end > row.prefix_begin;
    block.keys.begin = smaller(block.keys.begin, prefix ? row.prefix_begin : row.begin);
    block.keys.end = larger(block.keys.end, row.end);
    block.inner.begin = larger(block.inner.begin, row.begin);
    block.inner.end = smaller(block.inner.end, row.end);
    block.predicate_begin = smaller(block.predicate_begin, row.predicate_begin);
  }
  return block;
}

// Returns `from`; the compiler cannot tell that it does.
HWY_INLINE const float* same_memory(const float* from) {
  asm("" : "+r"(from));
  return from;
}

// Adds *x * y[v] to sum[v] for row r of a register tile. `again` is same_memory(x): a factor that
// is loaded twice becomes an operand of both multiply-adds, a factor that is loaded once needs an
// instruction of its own. That matters where the core's other thread takes half of the front end
// (chosen 2026-11-22: 15 to 18 % of a product there). Of 12 rows, 9 leave two loads a cycle.
template <int kVectors>
HWY_INLINE void multiply_by(const float* x, const float* again, int r, const F32 (&y)[kVectors],
                            F32 (&sum)[kVectors]) {
  constexpr int kRowsLoadedTwice = kLanes == 16 ? 9 : 0;
  const F32 factor = hn::Set(kF32, *x);
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) {
    const bool load_again = v == 1 && r < kRowsLoadedTwice;
    sum[v] = hn::MulAdd(load_again ? hn::Set(kF32, *again) : factor, y[v], sum[v]);
  }
}

}  // namespace
}  // namespace fovea::kernels::cpu::FOVEA_ISA
