// SPDX-License-Identifier: Apache-2.0
// Norm and rotary position embedding of keys that are copied to a cache, and of queries in place.
#pragma once

#include "kernels/cuda/common/head_write_params.h"
#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/common/rotary.cuh"

namespace fovea::kernels::cuda {

// A lane moves a chunk at a time. Rows are 16-byte aligned and a whole number of chunks long.
constexpr int kChunk = 8;
struct alignas(16) Chunk {
  uint16_t values[kChunk];
};

// The RMSNorm of one row. Without weights it changes nothing.
struct RowNorm {
  const float* weight = nullptr;
  float factor = 1;
  float plus = 0;

  __device__ float operator()(float value, int at) const {
    return weight ? weighted(value, weight[at]) : value;
  }
  // `own` is the value's weight, if there are weights.
  __device__ float weighted(float value, float own) const {
    return weight ? value * (factor * (plus + own)) : value;
  }
};

// Returns the norm of a row of `dim` values. All lanes of a warp call this; they sum in the order
// of layer_ops' prepare_heads.
template <Type kType>
__device__ inline RowNorm row_norm(const NormWeights& norm, const uint16_t* row, int dim) {
  if (!norm.weight) return {};
  float squares = 0;
  for (int i = threadIdx.x % 32; i < dim; i += 32) {
    const float value = to_float<kType>(row[i]);
    squares += value * value;
  }
  for (int step = 16; step > 0; step /= 2) squares += __shfl_xor_sync(~0u, squares, step);
  return {norm.weight, rsqrtf(squares / dim + norm.epsilon), norm.plus};
}

__device__ inline bool is_aligned_to_16(const void* address) {
  return reinterpret_cast<uint64_t>(address) % 16 == 0;
}

// Returns true if the values of chunk `index` rotate with those of one other chunk, and tables and
// weights can be read four values at a time. Reading them one by one takes longer than the rest.
__device__ inline bool rotates_with_chunk(const RotaryParams& rotary, const RowNorm& norm,
                                          int index) {
  return !rotary.interleaved && rotary.rotary_dim % (2 * kChunk) == 0 &&
         (index + 1) * kChunk <= rotary.rotary_dim && is_aligned_to_16(rotary.cos) &&
         is_aligned_to_16(rotary.sin) && is_aligned_to_16(norm.weight);
}

// Norms and rotates chunk `index`, for which rotates_with_chunk() is true.
template <Type kType>
__device__ inline void rotate_with_chunk(const RotaryParams& rotary, const RowNorm& norm,
                                         const uint16_t* row, int index, int64_t table,
                                         Chunk& chunk) {
  const RotaryPlace place = rotary_place(rotary, index * kChunk);
  const Chunk other = reinterpret_cast<const Chunk*>(row)[place.other / kChunk];
  const auto four = [](const float* values, int at) {
    return reinterpret_cast<const float4*>(values)[at / 4];
  };
#pragma unroll
  for (int i = 0; i < kChunk; i += 4) {
    const float4 cos = four(rotary.cos + table, place.pair + i);
    const float4 sin = four(rotary.sin + table, place.pair + i);
    float4 weight = {}, other_weight = {};
    if (norm.weight) {
      weight = four(norm.weight, index * kChunk + i);
      other_weight = four(norm.weight, place.other + i);
    }
    const auto turn = [&](int at, float own_weight, float others_weight, float c, float s) {
      const float value = norm.weighted(to_float<kType>(chunk.values[at]), own_weight);
      const float turned = norm.weighted(to_float<kType>(other.values[at]), others_weight);
      chunk.values[at] =
          static_cast<uint16_t>(pack<kType>(rotated(place, value, turned, c, s), 0.0f));
    };
    turn(i, weight.x, other_weight.x, cos.x, sin.x);
    turn(i + 1, weight.y, other_weight.y, cos.y, sin.y);
    turn(i + 2, weight.z, other_weight.z, cos.z, sin.z);
    turn(i + 3, weight.w, other_weight.w, cos.w, sin.w);
  }
}

// Returns chunk `index` of a token's row, normed, rotated and rounded.
template <Type kType>
__device__ inline Chunk rotated_chunk(const RotaryParams& rotary, const RowNorm& norm,
                                      const uint16_t* row, int index, int position) {
  Chunk chunk = reinterpret_cast<const Chunk*>(row)[index];
  const int64_t table = rotary_row(rotary, position);
  if (rotates_with_chunk(rotary, norm, index)) {
    rotate_with_chunk<kType>(rotary, norm, row, index, table, chunk);
    return chunk;
  }
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    const int at = index * kChunk + i;
    const bool rotates = at < rotary.rotary_dim;
    if (!rotates && !norm.weight) break;
    float value = norm(to_float<kType>(chunk.values[i]), at);
    if (rotates) {
      const RotaryPlace place = rotary_place(rotary, at);
      value = rotated(place, value, norm(to_float<kType>(row[place.other]), place.other),
                      rotary.cos[table + place.pair], rotary.sin[table + place.pair]);
    }
    chunk.values[i] = static_cast<uint16_t>(pack<kType>(value, 0.0f));
  }
  return chunk;
}

// The norm and the position of a row, and the last token that is written. Loads of all of them
// begin together, because a trip to the L2 cache takes longer than the rest of the kernel.
struct RowStart {
  RowNorm norm;
  int position;
  int tokens;

  template <Type kType>
  __device__ static RowStart load(const HeadWriteParams& params, const NormWeights& norm,
                                  const uint16_t* row, int dim, int64_t token) {
    RowStart start;
    start.tokens = params.rows.q_indptr[params.rows.requests];
    start.position = params.rows.rotary.cos ? params.rows.positions[token] : 0;
    read_early(row, dim);
    start.norm = row_norm<kType>(norm, row, dim);
    return start;
  }

  // Brings a row of `dim` values into the L1 cache, without waiting for it.
  __device__ static void read_early(const uint16_t* row, int dim) {
    touch(static_cast<int>(row[threadIdx.x % 32 * (dim / 32)]));
  }
};

// Norms and rotates the first `dim` values of a query head, one chunk a lane (256 values at most).
// All lanes read before any lane writes.
template <Type kType>
__device__ inline void rotate_query(const HeadWriteParams& params, int dim, int64_t token,
                                    int head) {
  const KvWriteParams& rows = params.rows;
  auto* const row =
      static_cast<uint16_t*>(rows.q) + token * rows.q_token_stride + head * rows.q_head_stride;
  const RowStart start = RowStart::load<kType>(params, params.q_norm, row, dim, token);
  if (token >= start.tokens) return;
  const int index = threadIdx.x % 32;
  const bool has_chunk = index < dim / kChunk;
  Chunk chunk;
  if (has_chunk) {
    chunk = rotated_chunk<kType>(rows.rotary, start.norm, row, index, start.position);
  }
  __syncwarp();
  if (has_chunk) reinterpret_cast<Chunk*>(row)[index] = chunk;
}

}  // namespace fovea::kernels::cuda
