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
    return weight ? value * (factor * (plus + weight[at])) : value;
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

// Returns chunk `index` of a token's row, normed, rotated and rounded.
template <Type kType>
__device__ inline Chunk rotated_chunk(const RotaryParams& rotary, const RowNorm& norm,
                                      const uint16_t* row, int index, int position) {
  Chunk chunk = reinterpret_cast<const Chunk*>(row)[index];
  const int64_t table = rotary_row(rotary, position);
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
