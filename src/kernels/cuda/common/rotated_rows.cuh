// SPDX-License-Identifier: Apache-2.0
// Rotary position embedding of keys that are copied to a cache, and of queries in place.
#pragma once

#include "kernels/cuda/common/attention_params.h"
#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/common/rotary.cuh"

namespace fovea::kernels::cuda {

// A lane moves a chunk at a time. Rows are 16-byte aligned and a whole number of chunks long.
constexpr int kChunk = 8;
struct alignas(16) Chunk {
  uint16_t values[kChunk];
};

// Returns chunk `index` of a token's row, rotated and rounded.
template <Type kType>
__device__ inline Chunk rotated_chunk(const RotaryParams& rotary, const uint16_t* row, int index,
                                      int position) {
  Chunk chunk = reinterpret_cast<const Chunk*>(row)[index];
  const int64_t table = rotary_row(rotary, position);
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    const int at = index * kChunk + i;
    if (at >= rotary.rotary_dim) break;
    const RotaryPlace place = rotary_place(rotary, at);
    const float value =
        rotated(place, to_float<kType>(chunk.values[i]), to_float<kType>(row[place.other]),
                rotary.cos[table + place.pair], rotary.sin[table + place.pair]);
    chunk.values[i] = static_cast<uint16_t>(pack<kType>(value, 0.0f));
  }
  return chunk;
}

// Rotates the first `dim` values of a query head, one chunk a lane (256 values at most). All lanes
// read before any lane writes.
template <Type kType>
__device__ inline void rotate_query(const KvWriteParams& params, int dim, int64_t token, int head) {
  auto* const row = static_cast<uint16_t*>(params.q) + token * params.q_token_stride +
                    head * params.q_head_stride;
  const int index = threadIdx.x % 32;
  const bool has_chunk = index < dim / kChunk;
  Chunk chunk;
  if (has_chunk) chunk = rotated_chunk<kType>(params.rotary, row, index, params.positions[token]);
  __syncwarp();
  if (has_chunk) reinterpret_cast<Chunk*>(row)[index] = chunk;
}

}  // namespace fovea::kernels::cuda
