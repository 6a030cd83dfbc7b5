// SPDX-License-Identifier: Apache-2.0
// The work of one warp on one tile of keys. Keys are the rows of both products, query rows the
// columns:
//   S^T [keys, rows] = K Q^T        O^T [head_dim_v, rows] += V^T P^T
// so that a group of 4 query heads fills half of an 8-wide tile instead of a quarter of a 16-high
// one.
#pragma once

#include "kernels/cuda/sm90/decode/queries.cuh"
#include "kernels/cuda/sm90/decode/scores.cuh"

namespace fovea::kernels::cuda {

// The factors from products to the scores that modify_score() takes, for each of a lane's query
// rows.
template <class C>
struct Factors {
  float values[C::kFp8 ? C::kColumns : 1][2];
  __device__ float of(int n, int i) const { return values[C::kFp8 ? n : 0][i]; }
};

// Multiplies the tile's keys with all query rows.
template <class C>
__device__ void score_tile(const char* tile, const Queries<C>& queries,
                           float (&scores)[C::kTile / 16][C::kColumns][4]) {
  const int lane = threadIdx.x % 32;
  // With few products each has two sums, so that one does not wait for the other.
  constexpr int kChains = C::kTile / 16 * C::kColumns <= 2 ? 2 : 1;
  float chains[kChains][C::kTile / 16][C::kColumns][4] = {};
  const auto multiply = [&](int m, int d, const uint32_t(&k)[4]) {
    auto& sums = chains[d / 16 % kChains];
#pragma unroll
    for (int n = 0; n < C::kColumns; ++n) {
      multiply_add<C::kMath>(sums[m][n], k, queries.fragments[d / 16][n][0],
                             queries.fragments[d / 16][n][1]);
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
        const uint32_t k0[4] = {widen<C::kKv>(raw[0]), widen<C::kKv>(raw[1]),
                                widen_upper<C::kKv>(raw[0]), widen_upper<C::kKv>(raw[1])};
        multiply(m, d, k0);
        if (d + 16 < C::kHeadDim) {
          const uint32_t k1[4] = {widen<C::kKv>(raw[2]), widen<C::kKv>(raw[3]),
                                  widen_upper<C::kKv>(raw[2]), widen_upper<C::kKv>(raw[3])};
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

// Adds the products of weights and values. Weights are the right operand: their 8x8 blocks
// [key, row] become [row, key].
template <class C>
__device__ void add_values(const char* tile, Accumulator<C>& acc,
                           const float (&weights)[C::kTile / 16][C::kColumns][4]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < C::kTile / 16; ++m) {
    uint32_t p[C::kColumns][2];
#pragma unroll
    for (int n = 0; n < C::kColumns; ++n) {
      p[n][0] = transposed_8x8(pack<C::kMath>(weights[m][n][0], weights[m][n][1]));
      p[n][1] = transposed_8x8(pack<C::kMath>(weights[m][n][2], weights[m][n][3]));
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
      // Rows g and g + 8 of a product are columns 2g and 2g + 1 of V: a transposed load moves
      // pairs.
#pragma unroll
      for (int d = 0; d < C::kHeadDimV; d += 32) {
        uint32_t raw[4];
        load_matrices_transposed(raw,
                                 tile + tile_offset<C>(m * 16 + lane % 16, d / 16 + lane / 16));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (d + 16 * half >= C::kHeadDimV) break;
          const uint32_t keys_low = __byte_perm(raw[2 * half], 0, 0x3120);
          const uint32_t keys_high = __byte_perm(raw[2 * half + 1], 0, 0x3120);
          const uint32_t v[4] = {widen<C::kKv>(keys_low), widen_upper<C::kKv>(keys_low),
                                 widen<C::kKv>(keys_high), widen_upper<C::kKv>(keys_high)};
#pragma unroll
          for (int n = 0; n < C::kColumns; ++n) {
            multiply_add<C::kMath>(acc.out[d / 16 + half][n], v, p[n][0], p[n][1]);
          }
        }
      }
    }
  }
}

// The masks and modifiers of an item's tiles.
struct TileMask {
  int open_begin;  // every row sees the keys [open_begin, open_end) of the item
  int open_end;
  bool predicate_on_old;  // the predicate may hide keys that are older than the pass
  bool predicate;
  bool modifies_scores;
  int head;         // this warp's head, counted in the item
  int first_scale;  // index in a stage of the scale of this warp's first key
};

// Clears the rows of V outside the item: weight 0 times an unowned value may be NaN.
template <class C>
__device__ __noinline__ void clear_unowned_keys(char* tile, int first, int begin, int end) {
  constexpr int kChunks = C::kVPieces * (kPieceBytes / 16);
  for (int i = threadIdx.x % 32; i < C::kTile * kChunks; i += 32) {
    const int key = first + i / kChunks;
    if (key >= begin && key < end) continue;
    *reinterpret_cast<uint4*>(tile + tile_offset<C>(i / kChunks, i % kChunks)) = {0, 0, 0, 0};
  }
  fence_async_proxy();
  __syncwarp();
}

// Position in the rings of K and V, whose number of stages is known at run time.
template <class C>
struct Ring {
  int stage = 0;
  uint32_t phase = 0;
  __device__ void advance(int stages) {
    if (++stage == stages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// Waits for the oldest of the copies; there are as many steps in flight as stages.
template <class C>
__device__ void wait_row_copies(int stages) {
  if (stages == C::kStages) {
    wait_copies<C::kStages - 1>();
  } else {
    wait_copies<C::kUsualStages - 1>();
  }
}

// Tells the copiers that this warp no longer reads a stage.
__device__ inline void release(TransactionBarrier& empty) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) empty.arrive();
}

// One step of the ring; `first` is the warp's first key of the step. Without boxes this warp has
// copied its keys itself. One function with these arguments: in smaller ones, or with a struct of
// them, fp8 decode with 32 keys a step spills registers.
template <class C, bool kBoxes>
__device__ void attend_tile(const DecodeParams& params, const Tile& tile, const TileMask& mask,
                            typename C::SharedMemory& shared, const Ring<C>& ring,
                            const Queries<C>& queries, const Factors<C>& factors, int first,
                            Accumulator<C>& acc) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  auto& k = shared.k[ring.stage];
  auto& v = shared.v[ring.stage];
  float scores[C::kTile / 16][C::kColumns][4];
  const bool token_scales = has_token_scales<C>(params);
  const auto scale_at = [&](int key) { return mask.first_scale + key * scale_pitch(params.batch); };
  if constexpr (kBoxes) {
    shared.k_full[ring.stage].wait(ring.phase);
  } else {
    wait_row_copies<C>(shared.stages);
    __syncwarp();
  }
  score_tile<C>(k.tiles[warp][0][0], queries, scores);
#pragma unroll
  for (int m = 0; m < C::kTile / 16; ++m) {
    float k_scale[2] = {1, 1};
    if (token_scales) {
      k_scale[0] = k.scales[scale_at(m * 16 + lane / 4)];
      k_scale[1] = k.scales[scale_at(m * 16 + lane / 4 + 8)];
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
  if (mask.modifies_scores) modify_scores<C>(params, tile, mask.head, first, scores);
  // The predicate is slow, so it is asked for old keys only if it may hide them.
  const bool asks =
      mask.predicate && (first + C::kTile > tile.view.prefix() || mask.predicate_on_old);
  if (asks || first < mask.open_begin || first + C::kTile > mask.open_end) {
    mask_scores<C>(params, tile, first, mask.predicate, scores);
  }
  float v_factor = 1;
  float v_rescale = 1;
  if (token_scales) {
    if constexpr (kBoxes) shared.v_full[ring.stage].wait(ring.phase);
    if (kBoxes && (first < tile.item.key_begin || first + C::kTile > tile.item.key_end)) {
      const int key = first + lane;
      if (lane < C::kTile && (key < tile.item.key_begin || key >= tile.item.key_end))
        v.scales[scale_at(lane)] = 0;
      __syncwarp();
    }
    float most = acc.v_unit;
#pragma unroll
    for (int m = 0; m < C::kTile / 16; ++m) {
      most = fmaxf(most, fmaxf(v.scales[scale_at(m * 16 + lane / 4)],
                               v.scales[scale_at(m * 16 + lane / 4 + 8)]));
    }
    for (int distance = 4; distance <= 16; distance *= 2)
      most = fmaxf(most, __shfl_xor_sync(~0u, most, distance));
    // Rounds up to a power of two and keeps 0: the unit then grows seldom, and a division by it
    // only subtracts exponents.
    const int unit = (__float_as_int(most) + 0x7fffff) & 0x7f800000;
    v_factor = __int_as_float(0x7f000000 - unit);
    v_rescale = acc.v_unit * v_factor;
    acc.v_unit = __int_as_float(unit);
  }
  softmax_tile<C>(acc, v_rescale, scores);
  if (token_scales) {
#pragma unroll
    for (int m = 0; m < C::kTile / 16; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float v_scale = v.scales[scale_at(m * 16 + lane / 4 + 8 * half)] * v_factor;
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
    clear_unowned_keys<C>(values, first, tile.item.key_begin, tile.item.key_end);
  }
  add_values<C>(values, acc, scores);
  if constexpr (kBoxes) release(shared.v_empty[ring.stage]);
}

}  // namespace fovea::kernels::cuda
