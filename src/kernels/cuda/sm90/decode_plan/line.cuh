// SPDX-License-Identifier: Apache-2.0
// The line of all (row tile, group of heads) pairs and how it is cut into ranges.
#pragma once

#include "kernels/cuda/common/decode_params.h"
#include "kernels/cuda/common/division.cuh"
#include "kernels/cuda/common/plan_block.cuh"
#include "kernels/cuda/common/visibility.cuh"

namespace fovea::kernels::cuda {

// A row tile and where its pairs begin in the line of one head.
template <int kOverhead>
struct TileOfPlan {
  RequestView view;
  int first_row;
  int first_key;  // the first any row sees; cuts are counted from the block of kGrain it lies in
  int end_key;
  int units;
  int64_t start;
  __device__ int cost() const { return units + kOverhead; }
};

// The cut line. Reads of it are shared memory.
struct Line {
  const int64_t* bounds;
  int ranges;
  float ranges_per_unit;
  int groups;  // of heads
  int heads;   // of a group
  int64_t pairs;
  int parts;  // of every pair, 1: as many as ranges make of it
  bool in_cluster;
  bool leaves_idle;  // which would have had work

  // The range that holds this place: a guess, put right.
  __device__ int range_at(int64_t place) const {
    int range = min(static_cast<int>(static_cast<float>(place) * ranges_per_unit), ranges - 1);
#pragma unroll 1
    while (bounds[range] > place) --range;
#pragma unroll 1
    while (bounds[range + 1] <= place) ++range;
    return range;
  }
};

// Where all tiles are alike, cuts at their ends save parts to be joined: a few percent of the CTAs
// are worth that. All others get every CTA: 64 log-uniform lengths take 457 us instead of 468
// (H200, 2026-11-22). Beside another kernel, which takes those that are left, whole tiles may leave
// any but `least_ctas`.
__device__ inline int range_count(const DecodeWork& work, int ctas, int pairs, int64_t line,
                                  bool at_ends, int least_ctas) {
  if (pairs == 0) return 0;
  const int rounds = pairs <= ctas ? 1 : short_quotient(pairs + ctas - 1, ctas);
  // How many CTAs have least_units; division of 64 bits would take half a microsecond here.
  const float fed = __fdividef(static_cast<float>(line), static_cast<float>(work.least_units));
  const int useful = max(static_cast<int>(fminf(fed, static_cast<float>(ctas))), 1);
  if (!at_ends) return useful;
  const int whole = rounds > 1 ? short_quotient(pairs + rounds - 1, rounds)
                               : pairs * max(short_quotient(useful, pairs), 1);
  return 4 * whole >= 3 * useful || whole >= least_ctas ? whole : useful;
}

// Cuts of the line: equal ranges, or equal parts of every pair of `tiles`.
template <typename Tile>
__device__ void cut_line(const Tile* tiles, int64_t line, int ranges, int parts, int groups,
                         int64_t* bounds) {
  const int thread = static_cast<int>(threadIdx.x);
  if (parts > 1) {
    for (int i = thread; i <= ranges; i += kPlanThreads) {
      const int pair = short_quotient(min(i, ranges - 1), parts);
      const int number = short_quotient(pair, groups);
      const Tile& tile = tiles[number];
      bounds[i] = tile.start * groups + (pair - number * groups) * tile.cost() +
                  short_quotient((i - pair * parts) * tile.units, parts);
    }
  } else if (ranges > 0) {
    // i * line / ranges, in numbers of 32 bits.
    const int64_t each = quotient(line, int64_t{ranges});
    const auto more = static_cast<int>(line - each * ranges);
    for (int i = thread; i <= ranges; i += kPlanThreads) {
      bounds[i] = i * each + short_quotient(i * more, ranges);
    }
  }
}

}  // namespace fovea::kernels::cuda
