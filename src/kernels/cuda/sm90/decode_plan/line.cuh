// SPDX-License-Identifier: Apache-2.0
// The line of all pairs of a row tile and a group of heads, and how it is cut into ranges.
#pragma once

#include "kernels/cuda/common/decode_params.h"
#include "kernels/cuda/common/division.cuh"
#include "kernels/cuda/common/plan_block.cuh"
#include "kernels/cuda/common/visibility.cuh"

namespace fovea::kernels::cuda {

// A row tile and the place in the line of one head where its pairs begin.
template <int kOverhead>
struct TileOfPlan {
  RequestView view;
  int first_row;
  int first_key;  // the first key that any row sees; cuts count from its block of kGrain keys
  int end_key;
  int units;
  int64_t start;
  __device__ int cost() const { return units + kOverhead; }
};

// The cut line.
struct Line {
  const int64_t* bounds;  // shared memory
  int ranges;
  float ranges_per_unit;
  int groups;  // groups of heads
  int heads;   // heads of a group
  int64_t pairs;
  int parts;         // parts of every pair; 1: as many as ranges make of it
  bool in_cluster;   // the CTAs of a cluster have the parts of one pair
  bool leaves_idle;  // some CTAs have no work, though there is enough for all

  // Returns the range that holds this place: corrects an estimate.
  __device__ int range_at(int64_t place) const {
    int range = min(static_cast<int>(static_cast<float>(place) * ranges_per_unit), ranges - 1);
#pragma unroll 1
    while (bounds[range] > place) --range;
#pragma unroll 1
    while (bounds[range + 1] <= place) ++range;
    return range;
  }
};

// Returns the number of ranges. If all tiles are alike, cuts at their ends save partial results
// that would have to be joined, which is worth a few percent of the CTAs. Otherwise every CTA is
// used (chosen on H200, 2026-11-22: 2 % faster). A concurrent kernel takes the CTAs that whole
// tiles leave, so these may leave all but min_ctas.
__device__ inline int range_count(const DecodeWork& work, int ctas, int pairs, int64_t line,
                                  bool at_ends, int min_ctas) {
  if (pairs == 0) return 0;
  const int rounds = pairs <= ctas ? 1 : short_quotient(pairs + ctas - 1, ctas);
  // The CTAs that get min_units each. A float, since a 64-bit division takes half a microsecond.
  const float fed = __fdividef(static_cast<float>(line), static_cast<float>(work.min_units));
  const int useful = max(static_cast<int>(fminf(fed, static_cast<float>(ctas))), 1);
  if (!at_ends) return useful;
  const int whole = rounds > 1 ? short_quotient(pairs + rounds - 1, rounds)
                               : pairs * max(short_quotient(useful, pairs), 1);
  return 4 * whole >= 3 * useful || whole >= min_ctas ? whole : useful;
}

// How the line is cut.
struct LineCut {
  int64_t line;  // length of the line
  int heads;     // kv heads of an item
  int groups;    // groups of so many heads
  int pairs;
  int ranges;
  int whole_pairs;   // pairs of every range but the last; 0: ranges begin anywhere
  int parts;         // parts of every pair; 1: as many as ranges make of it
  bool in_cluster;   // the CTAs of a cluster have the parts of one pair
  bool leaves_idle;  // some CTAs have no work, though there is enough for all
};

// Returns how many pairs each range has if ranges hold whole pairs, otherwise 0.
__device__ inline int whole_pairs_of(int pairs, int ranges) {
  if (ranges == 0 || ranges > pairs) return 0;
  const int each = short_quotient(pairs + ranges - 1, ranges);
  return short_quotient(pairs + each - 1, each) == ranges ? each : 0;
}

// Cuts the line into equal ranges, at the ends of pairs, or every pair into equal parts.
template <typename Tile>
__device__ void cut_line(const Tile* tiles, const LineCut& cut, int64_t* bounds) {
  const int thread = static_cast<int>(threadIdx.x);
  const int ranges = cut.ranges;
  const auto tile_of = [&](int pair, int64_t& start) -> const Tile& {
    const int number = short_quotient(pair, cut.groups);
    const Tile& tile = tiles[number];
    start = tile.start * cut.groups + (pair - number * cut.groups) * tile.cost();
    return tile;
  };
  if (cut.parts > 1) {
    for (int i = thread; i <= ranges; i += kPlanThreads) {
      const int pair = short_quotient(min(i, ranges - 1), cut.parts);
      int64_t start;
      const Tile& tile = tile_of(pair, start);
      bounds[i] = start + short_quotient((i - pair * cut.parts) * tile.units, cut.parts);
    }
  } else if (cut.whole_pairs > 0) {
    for (int i = thread; i < ranges; i += kPlanThreads) tile_of(i * cut.whole_pairs, bounds[i]);
    if (thread == 0) bounds[ranges] = cut.line;
  } else if (ranges > 0) {
    // i * line / ranges in 32-bit arithmetic.
    const int64_t each = quotient(cut.line, int64_t{ranges});
    const auto more = static_cast<int>(cut.line - each * ranges);
    for (int i = thread; i <= ranges; i += kPlanThreads) {
      bounds[i] = i * each + short_quotient(i * more, ranges);
    }
  }
}

}  // namespace fovea::kernels::cuda
