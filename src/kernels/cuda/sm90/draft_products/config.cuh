// SPDX-License-Identifier: Apache-2.0
// The division of states among blocks and warps, and what a block has in shared memory.
#pragma once

#include "kernels/cuda/common/division.cuh"
#include "kernels/cuda/common/recurrent_tokens.cuh"

namespace fovea::kernels::cuda {

template <Recurrence kKind_, int kColumns_, Type kState_>
struct ProductsShape : RowLanes<kColumns_> {
  static constexpr Recurrence kKind = kKind_;
  static constexpr int kColumns = kColumns_;
  static constexpr Type kState = kState_;
  static constexpr int kRows = 2;                   // a lane has parts of them
  static constexpr bool kHasDecays = kKind == kda;  // for each column
  static constexpr bool kHasDeltaRule = kKind == delta || kKind == kda;
  static_assert(type_bytes(kState) == 2);  // tf32 holds them

  static constexpr int kWarps = 4;
  static constexpr int kThreads = kWarps * 32;
  // A product has 16 rows of the state. A warp multiplies up to two such tiles one after the other,
  // because a block prepares its tokens once.
  static constexpr int kTiles = kKind == mamba2 ? 1 : 2;
  static constexpr int kTileRows = kWarps * 16;          // all warps have them
  static constexpr int kBlockRows = kTiles * kTileRows;  // at most
  static constexpr int kBlocksPerSm = kHasDecays ? 3 : 4;

  // The columns of a state are multiplied in steps. A lane loads those of four steps at once, 16
  // bytes; four lanes share a row.
  static constexpr int kSteps = kColumns / 8;
  static constexpr int kPartSteps = 4;
  static constexpr int kParts = kSteps / kPartSteps;
  // Returns the first of the two columns that lane `lane` of four has in a step.
  __device__ static constexpr int column_of(int step, int lane) {
    return step / kPartSteps * (8 * kPartSteps) + lane * (2 * kPartSteps) + step % kPartSteps * 2;
  }

  // Tokens have places in groups of four. Replayed ones begin with the first group, those of the
  // pass with the next one.
  static constexpr int kGroup = 4;
  static constexpr int kMaxReplayed = 8, kMaxNew = 8;
  static constexpr int kPlaces = kMaxReplayed + kMaxNew;
  // Rows in shared memory are padded, so that no more than two lanes of a product read one bank.
  static constexpr int kTokenColumns = kColumns + 4;
  static constexpr int kTokenRows = kBlockRows + 8;
};

// The places of a request's tokens.
struct TokenPlaces {
  int32_t replayed;   // places of replayed tokens
  int32_t first_new;  // the place of the pass's first token
  int32_t end;        // behind the last one
  int32_t taken;      // behind the last one that the stored state takes in
  int32_t updates;    // eight places each; at least one for a new state, which is stored anyway
  uint32_t live;      // a bit for each place with a token

  __device__ bool is_live(int32_t place) const { return live >> place & 1; }
  // Returns the bits of places with tokens before a place.
  __device__ uint32_t before(int32_t place) const { return live & ((1u << place) - 1); }
};

// The rows of one head's state of one request that a block takes.
template <class Shape>
struct ProductsUnit : HeadPlace {
  RequestTokens tokens;
  int32_t row, rows;  // the first, and how many

  __device__ explicit ProductsUnit(const RecurrenceParams& params) {
    const auto block = static_cast<int32_t>(blockIdx.x);
    head = short_quotient(block, params.tiles);
    key_head = short_quotient(head, params.key_group);
    rows = short_quotient(params.rows, params.tiles);
    row = (block - head * params.tiles) * rows;
    tokens = {params.plan.spans[blockIdx.y], params.plan.drafts[blockIdx.y]};
  }
  __device__ bool runs() const {
    const StateSpan& span = tokens.span;
    return span.begin < span.end && span.slot >= 0 && !span.in_chunks;
  }
  __device__ bool has_state() const { return runs() && !tokens.span.from_zero; }
  __device__ TokenPlaces places() const {
    const int32_t replayed = min(tokens.drafts.replayed, Shape::kMaxReplayed);
    const int32_t count = min(tokens.span.end - tokens.span.begin, Shape::kMaxNew);
    const int32_t first_new = (replayed + Shape::kGroup - 1) / Shape::kGroup * Shape::kGroup;
    const int32_t certain = count - tokens.drafts.drafts;
    const int32_t taken = certain > 0 ? first_new + certain : replayed;
    const int32_t updates = max((taken + 7) / 8, static_cast<int32_t>(tokens.span.from_zero));
    const uint32_t live = ((1u << replayed) - 1) | ((1u << count) - 1) << first_new;
    return {replayed, first_new, first_new + count, taken, updates, live};
  }
  // Returns the token at a place that is live.
  __device__ int32_t token_at(const TokenPlaces& places, int32_t place) const {
    return place < places.replayed ? tokens.begin() + place
                                   : tokens.span.begin + place - places.first_new;
  }
};

// A number in two parts for products of tf32, which ignore the bits that it does not have.
struct Tf32Parts {
  uint32_t high, low;
};
__device__ __forceinline__ Tf32Parts parts_of(float x) {
  const uint32_t high = to_tf32(x);
  return {high, __float_as_uint(__fsub_rn(x, __uint_as_float(high & 0xffffe000)))};
}

// A lane's operand B of a product, and its rest.
struct alignas(16) Tf32Pair {
  uint32_t high[2], low[2];
};
__device__ __forceinline__ Tf32Pair pair_of(float first, float second) {
  const Tf32Parts a = parts_of(first), b = parts_of(second);
  return {{a.high, b.high}, {a.low, b.low}};
}

// A lane's operand A of a product whose rows are eight vectors, then their rests.
struct alignas(16) Tf32Rows {
  uint32_t at[4];
};
__device__ __forceinline__ Tf32Rows rows_of(float first, float second) {
  const Tf32Parts a = parts_of(first), b = parts_of(second);
  return {{a.high, a.low, b.high, b.low}};
}

// The decays of columns, which KDA has.
template <class Shape, bool kExist = Shape::kHasDecays>
struct ColumnDecays {};
template <class Shape>
struct ColumnDecays<Shape, true> {
  using TokenRow = float[Shape::kTokenColumns];

  alignas(16) TokenRow of[Shape::kPlaces];  // logarithms at first
  TokenRow late[Shape::kPlaces];            // `in` times the decays behind its token
  TokenRow state, none;                     // decays of the state that is stored; ones
};

template <class Shape>
struct alignas(128) ProductsMemory {
  using TokenRow = float[Shape::kTokenColumns];
  static constexpr int kVectors = 2 * Shape::kGroup;  // `in` of a group's tokens, then `out`

  TokenRow in[Shape::kPlaces], out[Shape::kMaxNew];
  float values[Shape::kPlaces][Shape::kTokenRows];  // changes, once they are known
  Tf32Rows vectors[Shape::kMaxNew / Shape::kGroup][Shape::kSteps][32];
  Tf32Pair keys[Shape::kPlaces / 8][Shape::kSteps][32];  // eight places each, for updates
  // Products of `in` of a place with the vectors of groups, with the decays between.
  float pairs[Shape::kPlaces][2 * Shape::kMaxNew];
  float log_decay[Shape::kPlaces], strength[Shape::kPlaces];
  // Not KDA: the decay from the slot's state up to a place, and behind it up to the stored state.
  float reach[Shape::kPlaces], rest[Shape::kPlaces];
  float in_factor[Shape::kPlaces], out_factor[Shape::kPlaces];
  ColumnDecays<Shape> columns;
  // Registers are for the state.
  ProductsUnit<Shape> unit;
  TokenPlaces places;
};

}  // namespace fovea::kernels::cuda
