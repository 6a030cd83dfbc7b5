// SPDX-License-Identifier: Apache-2.0
// The division of states among blocks, and what a block has in shared memory.
#pragma once

#include "kernels/cuda/common/division.cuh"
#include "kernels/cuda/common/hopper.cuh"
#include "kernels/cuda/common/recurrent_tokens.cuh"

namespace fovea::kernels::cuda {

template <Recurrence kKind_, int kColumns_, Type kState_, int kRows_>
struct DraftsShape : RowLanes<kColumns_> {
  using Lanes = RowLanes<kColumns_>;
  static constexpr Recurrence kKind = kKind_;
  static constexpr int kColumns = kColumns_;
  static constexpr Type kState = kState_;
  static constexpr int kWarps = 4;
  static constexpr int kRows = kRows_;  // rows of a lane
  static constexpr int kBlockRows = kWarps * Lanes::kStep * kRows;
  static constexpr int kTile = 10;  // tokens that are staged at a time
  static constexpr int kBlocksPerSm = kRows == 4 ? 3 : 4;
};

// The tokens of a request and the rows of one head's state.
template <class Shape>
struct DraftsUnit : HeadPlace {
  RequestTokens tokens;
  int32_t row;  // the first

  // plan: the span and drafts of the request.
  __device__ DraftsUnit(const RecurrenceParams& params, int32_t index, const RequestTokens& plan)
      : tokens(plan) {
    const int32_t units = params.heads * params.tiles;  // a request
    const int32_t in_request = index - short_quotient(index, units) * units;
    head = short_quotient(in_request, params.tiles);
    key_head = short_quotient(head, params.key_group);
    row = (in_request - head * params.tiles) * Shape::kBlockRows;
  }
  __device__ static int32_t request_of(const RecurrenceParams& params, int32_t index) {
    return short_quotient(index, params.heads * params.tiles);
  }

  __device__ bool runs() const {
    const StateSpan& span = tokens.span;
    return span.begin < span.end && span.slot >= 0 && !span.in_chunks;
  }
  __device__ bool has_state() const { return runs() && !tokens.span.from_zero; }
  // Returns the index of the unit's first value in a slot.
  __device__ int64_t state_at(const RecurrenceParams& params, int32_t slot) const {
    return slot * params.state_slot_stride +
           static_cast<int64_t>(head * params.rows + row) * Shape::kColumns;
  }
};

// The tokens that are staged at a time.
struct StagedRange {
  int32_t first, count;
  int32_t replayed;  // the first ones
};

template <class Shape>
struct StagedTokens {
  static constexpr bool kHasDecays = Shape::kKind == kda;  // for each column

  float in[Shape::kTile][Shape::kColumns], out[Shape::kTile][Shape::kColumns];
  // Logarithms until their token's factors are found.
  alignas(16) float decays[kHasDecays ? Shape::kTile : 1][kHasDecays ? Shape::kColumns : 1];
  alignas(16) float values[Shape::kTile][Shape::kBlockRows];
  float log_decay[Shape::kTile], strength[Shape::kTile];
};

template <class Shape>
struct alignas(128) DraftsMemory {
  unsigned char state[Shape::kBlockRows * Shape::kColumns * type_bytes(Shape::kState)];
  StagedTokens<Shape> tokens[2];
  TokenFactors factors[Shape::kTile];
  RequestTokens plans[2];  // by the parity of a unit's number
  TransactionBarrier full;
};

}  // namespace fovea::kernels::cuda
