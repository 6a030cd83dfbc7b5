// SPDX-License-Identifier: Apache-2.0
// One tile of keys: partial scores, their sum and online softmax (arXiv:1805.02867), products with
// the values, which are the keys' first columns.
#pragma once

#include "kernels/cuda/common/log2.cuh"
#include "kernels/cuda/portable/mla_decode/load.cuh"

namespace fovea::kernels::cuda {

// The maximum that weights refer to lags behind the true one by up to this many powers of two, so
// that accumulated values are seldom rescaled.
constexpr float kMaximumLag = 8;
// Below any real score, yet finite, so that the difference of two is not NaN.
constexpr float kLowest = -1e30f;
// Scales of single keys are multiplied into the weights times this factor, since f16 weights would
// become subnormal without it.
constexpr float kScaleUnit = 256;

// A row of the softmax. kRowThreads neighbouring lanes share one.
struct SoftmaxRow {
  int key_begin;  // first key that the row sees; 0 without kWindows
  int key_end;    // exclusive; 0: the row does not exist
  int prefix;     // keys from here on are drafts of a tree
  uint64_t tree;  // drafts that the row sees
  float max;      // the maximum that weights refer to, as a power of two
  float sum;      // sum of the weights of this thread's keys
};

// Applies a window measured on given positions, which at most 64 new tokens have.
__device__ inline void limit_to_recent(const MaskParams& mask, const RequestView& view, int token,
                                       SoftmaxRow& row) {
  const int first = mask.positions[view.q_begin + token] - mask.window + 1;
  if (!mask.tree) row.tree = ~0ull >> (63 - token);
  for (int j = 0; j < view.q_len; ++j) {
    if (mask.positions[view.q_begin + j] < first) row.tree &= ~(1ull << j);
  }
  row.prefix = view.prefix();
  row.key_begin = max(min(first, row.prefix), 0);
}

template <class C>
__device__ __forceinline__ SoftmaxRow softmax_row(const PortableMlaParams& params,
                                                  const MlaItem& item) {
  const int row = threadIdx.x / C::kRowThreads;
  SoftmaxRow found = {0, 0, item.kv_len, 0, kLowest, 0};
  if (row >= live_rows<C>(params, item)) return found;
  const MaskParams& mask = params.batch.mask;
  const RequestView view = {item.request, item.q_begin, item.q_len, item.kv_len};
  const int token = (item.first_row + row) / params.batch.q_heads;
  found.key_end = min(item.key_end, visible_keys(mask, view, token, token).end);
  if (mask.tree) {
    found.prefix = view.prefix();
    found.tree = mask.tree[view.q_begin + token];
  }
  if constexpr (C::kWindows) {
    found.key_begin = visible_keys(mask, view, token, token).begin;
    if (mask.window > 0 && mask.positions) limit_to_recent(mask, view, token, found);
  }
  return found;
}

// Returns the item's first key that some row sees, rounded down to a tile: keys that a window hides
// from all rows are not computed.
template <class C>
__device__ __forceinline__ int first_tile_key(const PortableMlaParams& params,
                                              const MlaItem& item) {
  if (!C::kWindows || params.batch.mask.window == 0) return item.key_begin;
  const RequestView view = {item.request, item.q_begin, item.q_len, item.kv_len};
  const int token = item.first_row / params.batch.q_heads;
  const int begin = visible_keys(params.batch.mask, view, token, token).begin;
  return max(item.key_begin, begin / kBlockKeys * kBlockKeys);
}

template <class C>
struct Values {
  float of[C::kRowTiles][C::kValueColumns / 8][4] = {};
};

// Computes this warp's part of the scores: its columns for some keys.
template <class C>
__device__ __forceinline__ void score_tile(typename C::SharedMemory& shared, int stage,
                                           const Queries<C>& queries) {
  // With 64 rows there are registers for 8 keys only.
  constexpr int kAtOnce = C::kScoreKeys < 16 || C::kRows == 64 ? 8 : 16;
  const WarpPlace<C> place;
  const int lane = opaque(threadIdx.x) % 32;
#pragma unroll 1
  for (int first = 0; first < C::kScoreKeys; first += kAtOnce) {
    float scores[C::kRowTiles][kAtOnce / 8][4] = {};
    const int key = place.first_key + first + lane % 8 + (kAtOnce == 16 ? lane / 16 * 8 : 0);
#pragma unroll
    for (int step = 0; step < C::kSteps; ++step) {
      uint32_t keys[4];
      const int chunk = step_column<C>(place.column_part, step) / 8 + lane / 8 % 2;
      const uint16_t* from = chunk_of<C>(shared.keys[stage], key, chunk);
      if constexpr (kAtOnce == 16) {
        load_matrices(keys, from);
      } else {
        load_two_matrices(keys[0], keys[1], from);
      }
#pragma unroll
      for (int tile = 0; tile < C::kRowTiles; ++tile) {
#pragma unroll
        for (int n = 0; n < kAtOnce / 8; ++n) {
          if (step < C::kLatentSteps) {
            multiply_add<C::kMath>(scores[tile][n], queries.of[tile][step], keys[2 * n],
                                   keys[2 * n + 1]);
          } else {
            multiply_add<C::kRopeMath>(scores[tile][n], queries.of[tile][step], keys[2 * n],
                                       keys[2 * n + 1]);
          }
        }
      }
    }
#pragma unroll
    for (int tile = 0; tile < C::kRowTiles; ++tile) {
#pragma unroll
      for (int n = 0; n < kAtOnce / 8; ++n) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = place.first_row + tile * 16 + half * 8 + lane / 4;
          const int column = place.first_key + first + n * 8 + lane % 4 * 2;
          *reinterpret_cast<float2*>(&shared.scores[place.column_part][row][column]) = {
              scores[tile][n][2 * half], scores[tile][n][2 * half + 1]};
        }
      }
    }
  }
}

// Turns the sums of the scores into weights. `first` is the tile's first key.
template <class C>
__device__ __forceinline__ void softmax_tile(typename C::SharedMemory& shared, float factor,
                                             bool scaled_keys, int tile, int first,
                                             SoftmaxRow& row) {
  struct alignas(4 * C::kOwnKeys) Own {
    float of[C::kOwnKeys];
  };
  struct alignas(2 * C::kOwnKeys) OwnWeights {
    uint16_t of[C::kOwnKeys];
  };
  const int thread = opaque(threadIdx.x);
  const int at = thread / C::kRowThreads;
  const int begin = thread % C::kRowThreads * C::kOwnKeys;
  Own scores = {};
#pragma unroll
  for (int part = 0; part < C::kColumnParts; ++part) {
    const float* from = &shared.scores[part][at][begin];
#pragma unroll
    for (int i = 0; i < C::kOwnKeys; i += C::kOwnKeys < 4 ? C::kOwnKeys : 4) {
      if constexpr (C::kOwnKeys >= 4) {
        const float4 four = *reinterpret_cast<const float4*>(from + i);
        scores.of[i] += four.x;
        scores.of[i + 1] += four.y;
        scores.of[i + 2] += four.z;
        scores.of[i + 3] += four.w;
      } else {
        const Own own = *reinterpret_cast<const Own*>(from);
#pragma unroll
        for (int k = 0; k < C::kOwnKeys; ++k) scores.of[k] += own.of[k];
      }
    }
  }
  float largest = -infinity();
#pragma unroll
  for (int i = 0; i < C::kOwnKeys; ++i) {
    const int key = first + begin + i;
    if (C::kFp8 && scaled_keys) scores.of[i] *= shared.key_scale[tile % 2][begin + i];
    const bool seen = (!C::kWindows || key >= row.key_begin) && key < row.key_end &&
                      (key < row.prefix || (row.tree >> (key - row.prefix) & 1));
    scores.of[i] = seen ? scores.of[i] * factor : -infinity();
    largest = fmaxf(largest, scores.of[i]);
  }
#pragma unroll
  for (int step = 1; step < C::kRowThreads; step *= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
  }
  float rescale = 1;
  if (largest > row.max + kMaximumLag) {
    rescale = exp2_fast(row.max - largest);
    row.max = largest;
    row.sum *= rescale;
  }
  if (begin == 0) shared.row_factor[at] = rescale;
  OwnWeights weights;
#pragma unroll
  for (int i = 0; i < C::kOwnKeys; ++i) {
    float weight = exp2_fast(scores.of[i] - row.max);
    row.sum += weight;
    if (C::kFp8 && scaled_keys) weight *= shared.key_scale[tile % 2][begin + i] * kScaleUnit;
    weights.of[i] = static_cast<uint16_t>(pack<C::kMath>(weight, 0));
  }
  *reinterpret_cast<OwnWeights*>(&shared.weights[at][begin]) = weights;
}

template <class C>
__device__ __forceinline__ void add_values(typename C::SharedMemory& shared, int stage,
                                           Values<C>& values) {
  const WarpPlace<C> place;
  const int lane = opaque(threadIdx.x) % 32;
  float factor[C::kRowTiles][2];
  bool moved = false;
#pragma unroll
  for (int tile = 0; tile < C::kRowTiles; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      factor[tile][half] = shared.row_factor[place.first_row + tile * 16 + half * 8 + lane / 4];
      moved |= factor[tile][half] != 1;
    }
  }
  if (__any_sync(~0u, moved)) {
#pragma unroll
    for (int tile = 0; tile < C::kRowTiles; ++tile) {
#pragma unroll
      for (auto& four : values.of[tile]) {
        four[0] *= factor[tile][0];
        four[1] *= factor[tile][0];
        four[2] *= factor[tile][1];
        four[3] *= factor[tile][1];
      }
    }
  }
#pragma unroll 1
  for (int first = 0; first < C::kKeys; first += 16) {
    uint32_t weights[C::kRowTiles][4];
#pragma unroll
    for (int tile = 0; tile < C::kRowTiles; ++tile) {
      load_matrices(
          weights[tile],
          &shared.weights[place.first_row + tile * 16 + lane % 16][first + lane / 16 * 8]);
    }
#pragma unroll
    for (int d = 0; d < C::kValueColumns; d += 16) {
      uint32_t v[4];
      load_matrices_transposed(v, chunk_of<C>(shared.keys[stage], first + lane % 16,
                                              (place.first_value + d) / 8 + lane / 16));
#pragma unroll
      for (int tile = 0; tile < C::kRowTiles; ++tile) {
        multiply_add<C::kMath>(values.of[tile][d / 8], weights[tile], v[0], v[1]);
        multiply_add<C::kMath>(values.of[tile][d / 8 + 1], weights[tile], v[2], v[3]);
      }
    }
  }
}

}  // namespace fovea::kernels::cuda
