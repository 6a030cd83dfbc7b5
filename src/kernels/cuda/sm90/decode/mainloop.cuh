// SPDX-License-Identifier: Apache-2.0
// One warp and one tile of keys. Keys are the rows of both products, query rows the columns:
//   S^T [keys, rows] = K Q^T        O^T [head_dim_v, rows] += V^T P^T
// so that a group of 4 query heads fills half of an 8-wide tile instead of a quarter of a 16-high one. A
// lane holds query rows 2 * (lane % 4) and the next of every eight: maxima and sums stay in its registers.
#pragma once

#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/common/visibility.cuh"
#include "kernels/cuda/sm90/decode/config.cuh"
#include "kernels/cuda/sm90/decode/load.cuh"
#include "kernels/cuda/sm90/decode/queries.cuh"

namespace fovea::kernels::cuda {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

__device__ inline uint32_t transpose_8x8(uint32_t x) {
  uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

template <class C>
struct Accumulator {
  float out[C::kHeadDimV / 16][C::kColumns][4] = {};
  float most[C::kColumns][2];     // largest score so far, log2 units
  float sum[C::kColumns][2] = {};  // of this lane's keys
  float v_unit = 0;                // fp8 scales of V are applied relative to this
  __device__ Accumulator() {
#pragma unroll
    for (auto& pair : most) pair[0] = pair[1] = -infinity();
  }
};

// What turns a raw product into log2 units (natural ones with a cap), for each of a lane's query rows.
template <class C>
struct Factors {
  float values[C::kFp8 ? C::kColumns : 1][2];
  __device__ float of(int n, int i) const { return values[C::kFp8 ? n : 0][i]; }
};

// Raw products of the tile's keys with all query rows.
template <class C>
__device__ void score_tile(const char* tile, const Queries<C>& queries,
                           float (&scores)[C::kTile / 16][C::kColumns][4]) {
  const int lane = threadIdx.x % 32;
  // Few products: two sums each, so that one does not wait for the other.
  constexpr int kChains = C::kTile / 16 * C::kColumns <= 2 ? 2 : 1;
  float chains[kChains][C::kTile / 16][C::kColumns][4] = {};
  const auto multiply = [&](int m, int d, const uint32_t (&k)[4]) {
    auto& sums = chains[d / 16 % kChains];
#pragma unroll
    for (int n = 0; n < C::kColumns; ++n) {
      multiply_add<C::kMath>(sums[m][n], k, queries.fragments[d / 16][n][0], queries.fragments[d / 16][n][1]);
    }
  };
  if constexpr (!C::kFp8) {
#pragma unroll
    for (int d = 0; d < C::kHeadDim; d += 16) {
#pragma unroll
      for (int m = 0; m < C::kTile / 16; ++m) {
        uint32_t k[4];
        load_matrices(k, tile + tile_offset<C>(m * 16 + lane % 16, d / 8 + lane / 16));
        multiply(m, d, k);
      }
    }
  } else {
    // Four fp8 values of a lane are its columns 2t, 2t + 1, 2t + 8, 2t + 9: q lies in that order.
#pragma unroll
    for (int d = 0; d < C::kHeadDim; d += 32) {
#pragma unroll
      for (int m = 0; m < C::kTile / 16; ++m) {
        uint32_t raw[4];
        load_matrices(raw, tile + tile_offset<C>(m * 16 + lane % 16, d / 16 + lane / 16));
        const uint32_t k0[4] = {widen<C::kKv>(raw[0]), widen<C::kKv>(raw[1]), widen<C::kKv>(raw[0] >> 16),
                                widen<C::kKv>(raw[1] >> 16)};
        multiply(m, d, k0);
        if (d + 16 < C::kHeadDim) {
          const uint32_t k1[4] = {widen<C::kKv>(raw[2]), widen<C::kKv>(raw[3]),
                                  widen<C::kKv>(raw[2] >> 16), widen<C::kKv>(raw[3] >> 16)};
          multiply(m, d + 16, k1);
        }
      }
    }
  }
#pragma unroll
  for (int m = 0; m < C::kTile / 16; ++m) {
#pragma unroll
    for (int n = 0; n < C::kColumns; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        scores[m][n][i] = chains[0][m][n][i] + (kChains == 2 ? chains[kChains - 1][m][n][i] : 0.0f);
      }
    }
  }
}

// Calls visit(score, key of the tile, query row of the tile).
template <class C, typename Visit>
__device__ void for_each_score(float (&scores)[C::kTile / 16][C::kColumns][4], Visit visit) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < C::kTile / 16; ++m) {
#pragma unroll
    for (int n = 0; n < C::kColumns; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        visit(scores[m][n][i], m * 16 + lane / 4 + i / 2 * 8, n * 8 + lane % 4 * 2 + i % 2);
      }
    }
  }
}

// Soft cap and ALiBi.
template <class C>
__device__ void bend_scores(const DecodeParams& params, const Tile& tile, int head, int first,
                            float (&scores)[C::kTile / 16][C::kColumns][4]) {
  const MaskParams& mask = params.batch.mask;
  for_each_score<C>(scores, [&](float& score, int key, int row) {
    if (params.logit_cap > 0) {
      score = params.logit_cap * kLog2E * tanh_fast(score / params.logit_cap);
    }
    if (params.alibi_slopes && row < tile.rows) {
      const int distance = key_position(mask, tile.view, first + key) -
                           query_position(mask, tile.view, tile.token_of(row));
      score += params.alibi_slopes[tile.q_head_of(head, row)] * kLog2E * static_cast<float>(distance);
    }
  });
}

template <class C>
__device__ void mask_scores(const DecodeParams& params, const Tile& tile, int first, bool predicate,
                            float (&scores)[C::kTile / 16][C::kColumns][4]) {
  const MaskParams& mask = params.batch.mask;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < C::kColumns; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = n * 8 + lane % 4 * 2 + i;
      const int token = tile.token_of(row);
      Interval keys = {0, 0};
      if (row < tile.rows) keys = visible_keys(mask, tile.view, token, token);
      keys.begin = max(keys.begin, tile.item.key_begin);
      keys.end = min(keys.end, tile.item.key_end);
#pragma unroll
      for (int m = 0; m < C::kTile / 16; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int key = first + m * 16 + lane / 4 + half * 8;
          bool seen = key >= keys.begin && key < keys.end;
          if (predicate && seen) seen = visible(mask, tile.view, token, key);
          if (!seen) scores[m][n][2 * half + i] = -infinity();
        }
      }
    }
  }
}

// Scores to weights relative to the running maximum; rescales what was accumulated before.
template <class C>
__device__ void softmax_tile(Accumulator<C>& acc, float v_rescale,
                             float (&scores)[C::kTile / 16][C::kColumns][4]) {
#pragma unroll
  for (int n = 0; n < C::kColumns; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float most = acc.most[n][i];
#pragma unroll
      for (int m = 0; m < C::kTile / 16; ++m) {
        most = fmaxf(most, fmaxf(scores[m][n][i], scores[m][n][2 + i]));
      }
      // Eight lanes, four apart, share a query row.
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 4));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 8));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 16));
      // A row that has seen nothing keeps -inf: subtract 0 so that no inf - inf arises.
      const float base = most == -infinity() ? 0.0f : most;
      const float rescale = exp2_fast(acc.most[n][i] - base);
      acc.most[n][i] = most;
      float total = 0;
#pragma unroll
      for (int m = 0; m < C::kTile / 16; ++m) {
        scores[m][n][i] = exp2_fast(scores[m][n][i] - base);
        scores[m][n][2 + i] = exp2_fast(scores[m][n][2 + i] - base);
        total += scores[m][n][i] + scores[m][n][2 + i];
      }
      acc.sum[n][i] = acc.sum[n][i] * rescale + total;
#pragma unroll
      for (int d = 0; d < C::kHeadDimV / 16; ++d) {
        acc.out[d][n][i] *= rescale * v_rescale;
        acc.out[d][n][2 + i] *= rescale * v_rescale;
      }
    }
  }
}

// Weights as the right operand: 8x8 blocks [key, row] become [row, key].
template <class C>
__device__ void add_values(const char* tile, Accumulator<C>& acc,
                           const float (&weights)[C::kTile / 16][C::kColumns][4]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < C::kTile / 16; ++m) {
    uint32_t p[C::kColumns][2];
#pragma unroll
    for (int n = 0; n < C::kColumns; ++n) {
      p[n][0] = transpose_8x8(pack<C::kMath>(weights[m][n][0], weights[m][n][1]));
      p[n][1] = transpose_8x8(pack<C::kMath>(weights[m][n][2], weights[m][n][3]));
    }
    if constexpr (!C::kFp8) {
#pragma unroll
      for (int d = 0; d < C::kHeadDimV; d += 16) {
        uint32_t v[4];
        load_matrices_transposed(
            v, tile + tile_offset<C>(m * 16 + lane % 8 + lane / 16 * 8, d / 8 + lane / 8 % 2));
#pragma unroll
        for (int n = 0; n < C::kColumns; ++n) {
          multiply_add<C::kMath>(acc.out[d / 16][n], v, p[n][0], p[n][1]);
        }
      }
    } else {
      // Rows g and g + 8 of a product are columns 2g and 2g + 1 of V: a transposed load moves pairs.
#pragma unroll
      for (int d = 0; d < C::kHeadDimV; d += 32) {
        uint32_t raw[4];
        load_matrices_transposed(raw, tile + tile_offset<C>(m * 16 + lane % 16, d / 16 + lane / 16));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (d + 16 * half >= C::kHeadDimV) break;
          const uint32_t keys_low = __byte_perm(raw[2 * half], 0, 0x3120);
          const uint32_t keys_high = __byte_perm(raw[2 * half + 1], 0, 0x3120);
          const uint32_t v[4] = {widen<C::kKv>(keys_low), widen<C::kKv>(keys_low >> 16),
                                 widen<C::kKv>(keys_high), widen<C::kKv>(keys_high >> 16)};
#pragma unroll
          for (int n = 0; n < C::kColumns; ++n) {
            multiply_add<C::kMath>(acc.out[d / 16 + half][n], v, p[n][0], p[n][1]);
          }
        }
      }
    }
  }
}

// Where a tile is masked; the same for all of an item's tiles.
struct TileMask {
  int open_begin;  // every row sees the keys between, and only keys of the item are there
  int open_end;
  bool predicate;
  bool bend;
  int head;  // of the item, this warp's
};

// Makes the rows of V that the item does not own zero: weight 0 times what lies there may be NaN.
template <class C>
__device__ __noinline__ void clear_strangers(char* tile, int first, int begin, int end) {
  constexpr int kChunks = C::kVPieces * (kPieceBytes / 16);
  for (int i = threadIdx.x % 32; i < C::kTile * kChunks; i += 32) {
    const int key = first + i / kChunks;
    if (key >= begin && key < end) continue;
    *reinterpret_cast<uint4*>(tile + tile_offset<C>(i / kChunks, i % kChunks)) = {0, 0, 0, 0};
  }
  fence_async_proxy();
  __syncwarp();
}

// Where the ring of K and V stages is.
template <class C>
struct Ring {
  int stage = 0;
  uint32_t phase = 0;
  __device__ void advance() {
    if (++stage == C::kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// This warp is done with a stage.
__device__ inline void release(TransactionBarrier& empty) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) empty.arrive();
}

// One step of the ring; `first` is this warp's first key there. Without boxes this warp has copied its keys
// itself.
template <class C, bool kBoxes>
__device__ void attend_tile(const DecodeParams& params, const Tile& tile, const TileMask& mask,
                            typename C::SharedMemory& shared, const Ring<C>& ring, const Queries<C>& queries,
                            const Factors<C>& factors, int first, Accumulator<C>& acc) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  auto& k = shared.k[ring.stage];
  auto& v = shared.v[ring.stage];
  float scores[C::kTile / 16][C::kColumns][4];
  const bool token_scales = has_token_scales<C>(params);
  if constexpr (kBoxes) {
    shared.k_full[ring.stage].wait(ring.phase);
  } else {
    wait_copies<C::kStages - 1>();
    __syncwarp();
  }
  score_tile<C>(k.tiles[warp][0][0], queries, scores);
#pragma unroll
  for (int m = 0; m < C::kTile / 16; ++m) {
    float k_scale[2] = {1, 1};
    if (token_scales) {
      k_scale[0] = k.scales[warp][m * 16 + lane / 4];
      k_scale[1] = k.scales[warp][m * 16 + lane / 4 + 8];
    }
#pragma unroll
    for (int n = 0; n < C::kColumns; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        scores[m][n][i] *= factors.of(n, i % 2);
        if constexpr (C::kFp8) scores[m][n][i] *= k_scale[i / 2];
      }
    }
  }
  if constexpr (kBoxes) release(shared.k_empty[ring.stage]);
  if (mask.bend) bend_scores<C>(params, tile, mask.head, first, scores);
  if (mask.predicate || first < mask.open_begin || first + C::kTile > mask.open_end) {
    mask_scores<C>(params, tile, first, mask.predicate, scores);
  }
  float v_rescale = 1;
  if (token_scales) {
    if constexpr (kBoxes) shared.v_full[ring.stage].wait(ring.phase);
    float most = acc.v_unit;
#pragma unroll
    for (int m = 0; m < C::kTile / 16; ++m) {
      most = fmaxf(most, fmaxf(v.scales[warp][m * 16 + lane / 4], v.scales[warp][m * 16 + lane / 4 + 8]));
    }
    for (int step = 4; step <= 16; step *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
    if (most > 0) v_rescale = acc.v_unit / most;
    acc.v_unit = most;
  }
  softmax_tile<C>(acc, v_rescale, scores);
  if (token_scales) {
    const float factor = acc.v_unit > 0 ? 1 / acc.v_unit : 0;
#pragma unroll
    for (int m = 0; m < C::kTile / 16; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float v_scale = v.scales[warp][m * 16 + lane / 4 + 8 * half] * factor;
#pragma unroll
        for (int n = 0; n < C::kColumns; ++n) {
          scores[m][n][2 * half] *= v_scale;
          scores[m][n][2 * half + 1] *= v_scale;
        }
      }
    }
  }
  if constexpr (kBoxes) shared.v_full[ring.stage].wait(ring.phase);
  char* values = v.tiles[warp][0][0];
  if (kBoxes && (first < tile.item.key_begin || first + C::kTile > tile.item.key_end)) {
    clear_strangers<C>(values, first, tile.item.key_begin, tile.item.key_end);
  }
  add_values<C>(values, acc, scores);
  if constexpr (kBoxes) release(shared.v_empty[ring.stage]);
}

}  // namespace fovea::kernels::cuda
