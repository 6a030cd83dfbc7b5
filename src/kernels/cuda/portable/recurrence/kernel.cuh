// SPDX-License-Identifier: Apache-2.0
// The recurrences of linear layers, token by token. A block takes rows of one head's state of one
// request: it reads them once, keeps them in registers for all tokens of the request and writes
// them once, and where a snapshot is asked for.
//
//   grid: x = (head, tile of kBlockRows rows), y = request
//   warp: kStep * kRows rows; eight lanes share a row
//
// Every sum has one order, so a sequence has the same bits in one piece, in chunks, token by token
// and among other requests.
#pragma once

#include "kernels/cuda/portable/recurrence/load.cuh"

namespace fovea::kernels::cuda {

template <class Shape>
struct RecurrenceConfig {
  using Params = RecurrenceParams;
  using Place = StatePlace<Shape>;
  using State = StateRows<Shape>;
  using Vectors = TokenVectors<Shape>;
  using Tile = TokenTile<Shape>;
  using Step = RecurrenceStep<Shape>;
  struct Staged {
    const Tile* tile;
    const TokenFactors* factors;  // [kTile]
  };
  static constexpr int kBlocksPerSm = Shape::kBlocksPerSm;
  static constexpr KernelTraits kTraits = {Shape::kWarps * 32, 0, Shape::kBlockRows, 0};

  // Stores the result of a row of the thread.
  __device__ static void store_result(const Params& params, const Place& place, int32_t token,
                                      int r, float result) {
    if (!State::exists(params, place, r)) return;
    const int64_t row = static_cast<int64_t>(place.head) * params.rows + place.row;
    params.result[token * params.result_stride + row + r * Shape::kStep] = result;
  }

  // Rounds the state as it is in memory, and stores it where a snapshot is asked for.
  __device__ static void finish_token(const Params& params, const Place& place, int32_t token,
                                      State& state) {
    state.round(params);
    if (params.plan.snapshot_slots == nullptr) return;
    const int32_t slot = params.plan.snapshot_slots[token];
    if (slot >= 0) state.store(params, place, slot);
  }

  // One token, straight from memory.
  __device__ static void run_token(const Params& params, const Place& place, int32_t token,
                                   State& state) {
    const TokenPlace<Shape> from(params, place, place.row, token);
    const int32_t columns = params.columns - place.column;
    Vectors vectors;
    vectors.in.load(from.in + place.column, columns);
    vectors.out.load(from.out + place.column, columns);
    float log_decay = 0, strength = 1;
    if constexpr (Shape::kKind == kda) {
      vectors.decays.load(Step::column_decays(params, from.gate) + place.column, columns);
      vectors.exponentiate();
    } else {
      log_decay = *Step::log_decay_at(params, from.gate, place.head);
    }
    if constexpr (Shape::kKind != lightning) strength = params.strength[from.gate];
    float values[Shape::kRows], reads[Shape::kRows];
#pragma unroll
    for (int r = 0; r < Shape::kRows; ++r) {
      values[r] = State::exists(params, place, r) ? from.values[r * Shape::kStep] : 0.0f;
    }
    const TokenFactors factors = Step::factors_of(params, vectors, log_decay, strength);
    Step::update(state.rows, vectors, factors, values);
#pragma unroll
    for (int r = 0; r < Shape::kRows; ++r) reads[r] = state.rows[r].partial_dot(vectors.out);
    sum_over_lanes<Shape>(reads);
    if (place.column == 0) {
#pragma unroll
      for (int r = 0; r < Shape::kRows; ++r) {
        store_result(params, place, token, r,
                     Step::result_of(params, place.head, factors.out, values[r], reads[r]));
      }
    }
    finish_token(params, place, token, state);
  }

  // The first `count` tokens of a tile. Sums of eight tokens' results meet in one exchange, after
  // which lane l has those of token l.
  __device__ static void run_tile(const Params& params, const Place& place, const Staged& staged,
                                  int32_t first, int32_t count, State& state) {
    constexpr int kGroup = Shape::kRowLanes;
    const Tile& tile = *staged.tile;
    const int32_t row = Place::row_in_block();
#pragma unroll 1
    for (int32_t begin = 0; begin < count; begin += kGroup) {
      float parts[Shape::kRows][kGroup] = {};
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        const int32_t t = begin + i;
        if (t >= count) continue;
        Vectors vectors;
        tile.load(t, place.column, vectors);
        float values[Shape::kRows];
#pragma unroll
        for (int r = 0; r < Shape::kRows; ++r) values[r] = tile.values[t][row + r * Shape::kStep];
        Step::update(state.rows, vectors, staged.factors[t], values);
#pragma unroll
        for (int r = 0; r < Shape::kRows; ++r) parts[r][i] = state.rows[r].partial_dot(vectors.out);
        finish_token(params, place, first + t, state);
      }
      const int32_t own = begin + place.column / 4;
#pragma unroll
      for (int r = 0; r < Shape::kRows; ++r) {
        const float read = transposed_sum<Shape>(parts[r]);
        if (own >= count) continue;
        const float value = tile.values[own][row + r * Shape::kStep];
        store_result(params, place, first + own, r,
                     Step::result_of(params, place.head, staged.factors[own].out, value, read));
      }
    }
  }

  // Any number of tokens: the next tile is copied while one is computed.
  __device__ static void run_tokens(const Params& params, const Place& place, const StateSpan& span,
                                    State& state) {
    __shared__ __align__(16) Tile tiles[2];
    __shared__ TokenFactors factors[Shape::kTile];
    tiles[0].start_copies(params, place, span.begin, span.end);
    commit_copies();
#pragma unroll 1
    for (int32_t first = span.begin, at = 0; first < span.end; first += Shape::kTile, at ^= 1) {
      if (first + Shape::kTile < span.end) {
        tiles[at ^ 1].start_copies(params, place, first + Shape::kTile, span.end);
      }
      commit_copies();
      wait_copies<1>();
      __syncthreads();
      // Eight lanes find the factors of a token.
      const auto own = static_cast<int32_t>(threadIdx.x) / Shape::kRowLanes % Shape::kTile;
      const TokenFactors found = tiles[at].prepare(params, own, place.column);
      if (place.column == 0) factors[own] = found;
      __syncthreads();
      run_tile(params, place, {&tiles[at], factors}, first, min(Shape::kTile, span.end - first),
               state);
      __syncthreads();
    }
  }

  __device__ static void run(const Params& params) {
    if (!params.state_is_ready) wait_for_previous_kernel();
    const Place place(params);
    const StateSpan span = params.plan.spans[blockIdx.y];
    const bool runs = span.begin < span.end && span.slot >= 0 && !span.in_chunks;
    State state;
    if (runs && !span.from_zero) {
      state.load(params, place, span.slot);
    } else {
      state.clear();
    }
    if (params.state_is_ready) wait_for_previous_kernel();
    allow_next_kernel();
    if (runs) {
      if constexpr (Shape::kTokens == one) {
        for (int32_t token = span.begin; token < span.end; ++token) {
          run_token(params, place, token, state);
        }
      } else {
        run_tokens(params, place, span, state);
      }
      state.store(params, place, span.slot);
      return;
    }
    if (place.column != 0 || span.in_chunks) return;
    for (int32_t token = span.begin; token < span.end; ++token) {
#pragma unroll
      for (int r = 0; r < Shape::kRows; ++r) store_result(params, place, token, r, 0);
    }
  }
};

template <Recurrence kKind, int kColumns, TokenCount kTokens>
using Config = RecurrenceConfig<RecurrenceShape<kKind, kColumns, kTokens>>;

}  // namespace fovea::kernels::cuda
