// SPDX-License-Identifier: Apache-2.0
// The rows of a state that a warp works on, and the shared memory that holds them.
#pragma once

#include "kernels/cuda/common/division.cuh"
#include "kernels/cuda/common/hopper.cuh"
#include "kernels/cuda/common/recurrence.cuh"

namespace fovea::kernels::cuda {

template <Recurrence kKind_, int kColumns_, Type kState_>
struct DecodeShape : RowLanes<kColumns_> {
  using Lanes = RowLanes<kColumns_>;
  static constexpr Recurrence kKind = kKind_;
  static constexpr int kColumns = kColumns_;
  static constexpr Type kState = kState_;
  static constexpr int kRows = 2;  // a lane has them
  static constexpr int kTileRows = Lanes::kStep * kRows;
  static constexpr int kTileBytes = kTileRows * kColumns * type_bytes(kState);
  static constexpr int kTiles = kState == f32 ? 2 : 4;  // a block has up to so many
  static constexpr int kBlockRows = kTiles * kTileRows;
  static constexpr int kBlocksPerSm = 16;
};

// The rows of one head's state of one request that a block takes: one to kTiles tiles.
template <class Shape>
struct DecodeRows {
  int32_t head;
  int32_t row;  // the first
  int32_t tiles;
  StateSpan span;

  __device__ explicit DecodeRows(const RecurrenceParams& params) {
    const auto block = static_cast<int32_t>(blockIdx.x);
    const int32_t rows = short_quotient(params.rows, params.tiles);
    head = short_quotient(block, params.tiles);
    row = (block - head * params.tiles) * rows;
    tiles = rows / Shape::kTileRows;
    span = params.plan.spans[blockIdx.y];
  }
  __device__ bool runs() const {
    return span.begin < span.end && span.slot >= 0 && !span.in_chunks;
  }
};

template <class Shape>
struct alignas(128) DecodeMemory {
  unsigned char state[Shape::kTiles][Shape::kTileBytes];
  // Inputs of the request's first token.
  float in[Shape::kColumns], out[Shape::kColumns];
  alignas(16) float log_decays[Shape::kKind == kda ? Shape::kColumns : 4];  // KDA
  alignas(16) float values[Shape::kTiles * Shape::kTileRows];
  float log_decay, strength;
  TransactionBarrier inputs, tiles[Shape::kTiles];
};

}  // namespace fovea::kernels::cuda
