// SPDX-License-Identifier: Apache-2.0
// The axes of prefill variants, and what each value of them means to the roles of a block.
#pragma once

#include "kernels/cuda/sm90/common/work_tile.cuh"

namespace fovea::kernels::cuda {

// How keys reach shared memory.
//   pages    boxes of pages by the copy engine
//   pairs    as pages, to both blocks of a cluster, which take neighbouring row tiles as one
//   passing  as pairs; a block skips key tiles that only the other block's rows see
//   rows     one by one, by threads of the producer, which also widen fp8 values to f16
//   tokens   as rows, from pages of one token
//   boxes    as pages, fp8 values that threads widen to f16
enum Loader : int { pages, rows, pairs, boxes, passing, tokens };

// Steps from a product to the softmax. Each feature costs registers, so variants without it are
// faster.
//   plain      a softmax over the keys of one interval per row
//   exponents  as plain. Scores become exponents of weights while the values of the previous key
//              tile are still being multiplied, and rows that have outgrown their base are found
//              before the next turn. A base that rises is then subtracted from the exponents, so
//              bits depend on the key tile that a row tile began with.
//   masked     also masks by predicate
//   sloped     also ALiBi
//   general    also soft caps
enum Scores : int { plain, exponents, masked, sloped, general };

// How the keys of a row are summed.
//   whole      all at once
//   segments   segment by segment, so that blocks may share a row tile and the bits of its rows do
//              not depend on that
//   few_rows   the bits of segments, for requests with up to 64 rows
//   parts      items of portable/plan's list: parts of the keys of row tiles
//   few_parts  as parts, of row tiles of 64 rows
//   few_whole  as whole, of row tiles of 64 rows
enum Sums : int { whole, segments, few_rows, parts, few_parts, few_whole };

template <int kDim, int kDimV>
struct HeadDims {
  static constexpr int kHeadDim = kDim;
  static constexpr int kHeadDimV = kDimV;
};

// Types of queries and of stored keys. Operands of products are kMath: an fp8 cache is exact in
// f16, and bf16 queries become f16 relative to a power of two near the largest value of their row.
template <Type kQuery, Type kCache>
struct Types {
  static constexpr Type kQ = kQuery;
  static constexpr Type kKv = kCache;
  static constexpr bool kFp8 = type_bytes(kCache) == 1;
  static constexpr bool kNarrow = type_bytes(kQuery) == 1;  // fp8 products
  static constexpr bool kWiden = kFp8 && !kNarrow;
  static_assert(kWiden || kQuery == kCache);
  static constexpr Type kMath = kWiden ? f16 : kQuery;
  static constexpr Type kOut = kNarrow ? bf16 : kQuery;
  static constexpr int kBytes = type_bytes(kQuery);  // bytes of an operand's element
};

template <class Head, class Elements, Loader kLoad, Scores kScores, Sums kSums>
struct Axes : Head, Elements {
  static constexpr bool kRows = kLoad == rows || kLoad == boxes || kLoad == tokens;
  static constexpr bool kBoxes = kLoad == boxes;
  static constexpr bool kPasses = kLoad == passing;
  static constexpr bool kPairs = kLoad == pairs || kPasses;
  static constexpr int kBlocks = kPairs ? 2 : 1;  // blocks of a cluster
  static constexpr bool kExponents = kScores == exponents;
  static constexpr bool kMasked = kScores != plain && !kExponents;
  static constexpr bool kCaps = kScores == general;
  static constexpr bool kTransforms = kScores == sloped || kCaps;
  static constexpr bool kParts = kSums == parts || kSums == few_parts;
  static constexpr bool kSegments = kSums == segments || kSums == few_rows;
  // The only consumer of its block weighs scores while its own values are multiplied.
  static constexpr bool kAlone = kSums == few_rows;
  // A producer warp finds masks if it has nothing else to do.
  static constexpr bool kFindsApart = kMasked && !kRows && !Elements::kNarrow && !kSegments;
  // Key tiles between an item and the common prefix are skipped.
  static constexpr bool kSkips = kFindsApart && !kParts;
  // Consumers release trailing key tiles that are fully masked for their rows without reading them:
  // without a group the four consumers of a pair have 256 tokens, and key tiles 64 or 128 keys.
  static constexpr bool kOwnEnds =
      kLoad == pairs && Head::kHeadDim > 128 && kScores == plain&& kSums == whole;
};

}  // namespace fovea::kernels::cuda
