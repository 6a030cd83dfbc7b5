// SPDX-License-Identifier: Apache-2.0
// The tiles of states that warps work on, and the stages that hold them.
#pragma once

#include "kernels/cuda/common/division.cuh"
#include "kernels/cuda/common/hopper.cuh"
#include "kernels/cuda/common/recurrence.cuh"
#include "kernels/cuda/common/ring.cuh"

namespace fovea::kernels::cuda {

template <Recurrence kKind_, int kColumns_, Type kState_>
struct DecodeShape : RowLanes<kColumns_> {
  using Lanes = RowLanes<kColumns_>;
  static constexpr Recurrence kKind = kKind_;
  static constexpr int kColumns = kColumns_;
  static constexpr Type kState = kState_;
  static constexpr int kWarps = 8;
  static constexpr int kTileRows = kState == f32 ? 8 : 16;
  static constexpr int kTileBytes = kTileRows * kColumns * type_bytes(kState);
  static constexpr int kRows = kTileRows / Lanes::kStep;  // rows of a lane
  static constexpr int kStages = 5;
  static constexpr int kBlocksPerSm = 1;
};

// A tile: rows of one head's state of one request, contiguous in memory.
struct StateTile {
  StateSpan span;
  int32_t head;
  int32_t row;  // the first

  __device__ bool runs() const {
    return span.begin < span.end && span.slot >= 0 && !span.in_chunks;
  }
};

template <class Shape>
struct alignas(128) TileStage {
  unsigned char state[Shape::kTileBytes];
  // Vectors of the request's first token.
  float in[Shape::kColumns], out[Shape::kColumns];
  alignas(16) float log_decays[Shape::kKind == kda ? Shape::kColumns : 4];  // KDA
  TransactionBarrier full;
  StateTile tile;
};

template <class Shape>
struct DecodeMemory {
  TileStage<Shape> stages[Shape::kWarps][Shape::kStages];
};

// The tiles of a warp. Neighbours are on different multiprocessors, so that few tiles use all.
template <class Shape>
struct TileWalk {
  int32_t tiles_of_head, tiles_of_request;
  int32_t first, step, count;
  StateSpan span = {};  // in lane l, the request of tile 32 * n + l of the warp

  __device__ explicit TileWalk(const RecurrenceParams& params) {
    const auto warp = static_cast<int32_t>(threadIdx.x / 32);
    const auto blocks = static_cast<int32_t>(gridDim.x);
    tiles_of_head = params.rows / Shape::kTileRows;
    tiles_of_request = params.heads * tiles_of_head;
    const int32_t tiles = params.requests * tiles_of_request;
    first = warp * blocks + static_cast<int32_t>(blockIdx.x);
    step = blocks * Shape::kWarps;
    count = first < tiles ? (tiles - first - 1) / step + 1 : 0;
  }

  // Returns the warp's n-th tile. Every lane calls this, for n = 0, 1, 2 ...
  __device__ StateTile tile(const RecurrenceParams& params, int32_t n) {
    const auto lane = static_cast<int32_t>(threadIdx.x % 32);
    if (n % 32 == 0 && n + lane < count) {
      span = params.plan.spans[short_quotient(first + (n + lane) * step, tiles_of_request)];
    }
    StateTile tile;
    tile.span.begin = __shfl_sync(~0u, span.begin, n % 32);
    tile.span.end = __shfl_sync(~0u, span.end, n % 32);
    tile.span.slot = __shfl_sync(~0u, span.slot, n % 32);
    const int flags = __shfl_sync(~0u, span.from_zero | span.in_chunks << 16, n % 32);
    tile.span.from_zero = static_cast<int16_t>(flags & 0xffff);
    tile.span.in_chunks = static_cast<int16_t>(flags >> 16);
    const int32_t at = first + n * step;
    const int32_t in_request = at - short_quotient(at, tiles_of_request) * tiles_of_request;
    tile.head = short_quotient(in_request, tiles_of_head);
    tile.row = (in_request - tile.head * tiles_of_head) * Shape::kTileRows;
    return tile;
  }
};

}  // namespace fovea::kernels::cuda
