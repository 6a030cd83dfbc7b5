// SPDX-License-Identifier: Apache-2.0
// The recurrences of linear layers, token by token. A block takes rows of one head's state of one
// request: it reads them once, keeps them in registers for all tokens of the request and writes
// them once, and where a snapshot is asked for. If slots keep drafts, the tokens of a request begin
// with drafts of earlier passes, and the state is written before those of this one.
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
    Tile* tile;
    const TokenFactors* factors;  // [kTile]
    int32_t first, count;         // tokens
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

  // Rounds the state as it is in memory, and stores it where a snapshot is asked for, and in its
  // slot before drafts.
  __device__ static void finish_token(const Params& params, const Place& place,
                                      const RequestTokens& tokens, int32_t token, State& state) {
    state.round(params);
    const bool has_snapshot = params.plan.snapshot_slots != nullptr && !tokens.is_replayed(token);
    int32_t later = has_snapshot ? params.plan.snapshot_slots[token] : -1;
    const bool is_kept = tokens.drafts.drafts > 0 && token + 1 == tokens.first_draft();
    int32_t slot = is_kept ? tokens.span.slot : -1;
#pragma unroll 1
    while (slot >= 0 || later >= 0) {
      if (slot >= 0) state.store(params, place, slot);
      slot = later;
      later = -1;
    }
  }

  // One token, straight from memory. A replayed one has no result.
  __device__ static void run_token(const Params& params, const Place& place,
                                   const RequestTokens& tokens, int32_t token, State& state) {
    const TokenPlace<Shape> from(params, place, tokens, place.row, token);
    const int32_t columns = params.columns - place.column;
    Vectors vectors;
    vectors.in.load(from.in + place.column, columns);
    vectors.out.load(from.out + place.column, columns);
    float log_decay = 0, strength = 1;
    if constexpr (Shape::kKind == kda) {
      vectors.decays.load(from.log_decay + place.column, columns);
      vectors.exponentiate();
    } else {
      log_decay = *from.log_decay;
    }
    if constexpr (Shape::kKind != lightning) strength = *from.strength;
    float values[Shape::kRows], reads[Shape::kRows];
#pragma unroll
    for (int r = 0; r < Shape::kRows; ++r) {
      values[r] = State::exists(params, place, r) ? from.values[r * Shape::kStep] : 0.0f;
    }
    const TokenFactors factors = Step::factors_of(params, vectors, log_decay, strength);
    if (tokens.is_replayed(token)) {
      Step::replay(state.rows, vectors, factors, values);
      return finish_token(params, place, tokens, token, state);
    }
    const auto changes = Step::update(state.rows, vectors, factors, values);
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
    finish_token(params, place, tokens, token, state);
    if (token < tokens.first_draft()) return;
    keep_draft<Shape>(params, place, tokens, token,
                      TokenPlace<Shape>(params, place, tokens, place.first_row(), token));
    if (!Step::kHasDeltaRule || place.column != 0) return;
    float* const to = tokens.kept_row(params.kept, token) + params.kept.changes_at;
#pragma unroll
    for (int r = 0; r < Shape::kRows; ++r) {
      if (!State::exists(params, place, r)) continue;
      to[place.head * params.rows + place.row + r * Shape::kStep] = changes.of[r];
    }
  }

  // Takes the replayed tokens of a tile into the state, with a delta rule: otherwise an update
  // needs no sums anyway. Returns their number.
  __device__ static int32_t replay_tokens(const Params& params, const Place& place,
                                          const RequestTokens& tokens, const Staged& staged,
                                          State& state) {
    const Tile& tile = *staged.tile;
    const int32_t row = Place::row_in_block();
    int32_t t = 0;
#pragma unroll 1
    for (; t < staged.count && tokens.is_replayed(staged.first + t); ++t) {
      Vectors vectors;
      tile.load(t, place.column, vectors);
      float kept[Shape::kRows];
#pragma unroll
      for (int r = 0; r < Shape::kRows; ++r) kept[r] = tile.values[t][row + r * Shape::kStep];
      Step::replay(state.rows, vectors, staged.factors[t], kept);
      finish_token(params, place, tokens, staged.first + t, state);
    }
    return t;
  }
  // Leaves a token's changes in the place of its values.
  __device__ static void leave_changes(const Place& place, Tile& tile, int32_t t,
                                       const typename Step::Changes& changes) {
    if (!Step::kHasDeltaRule || place.column != 0) return;
#pragma unroll
    for (int r = 0; r < Shape::kRows; ++r) {
      tile.values[t][Place::row_in_block() + r * Shape::kStep] = changes.of[r];
    }
  }

  // The tokens of a tile from `begin` on. Sums of eight tokens' results meet in one exchange, after
  // which lane l has those of token l. Replayed tokens have no result.
  __device__ static void run_tile(const Params& params, const Place& place,
                                  const RequestTokens& tokens, const Staged& staged, int32_t begin,
                                  State& state) {
    constexpr int kGroup = Shape::kRowLanes;
    Tile& tile = *staged.tile;
    const int32_t first = staged.first, count = staged.count;
    const int32_t row = Place::row_in_block();
#pragma unroll 1
    for (; begin < count; begin += kGroup) {
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
        leave_changes(place, tile, t, Step::update(state.rows, vectors, staged.factors[t], values));
        if (!tokens.is_replayed(first + t)) {
#pragma unroll
          for (int r = 0; r < Shape::kRows; ++r) {
            parts[r][i] = state.rows[r].partial_dot(vectors.out);
          }
        }
        finish_token(params, place, tokens, first + t, state);
      }
      const int32_t own = begin + place.column / 4;
#pragma unroll
      for (int r = 0; r < Shape::kRows; ++r) {
        const float read = own_sum_over_lanes<Shape>(parts[r]);
        if (own >= count || tokens.is_replayed(first + own)) continue;
        const float value = tile.values[own][row + r * Shape::kStep];
        store_result(params, place, first + own, r,
                     Step::result_of(params, place.head, staged.factors[own].out, value, read));
      }
    }
  }

  // The same for a few tokens, each with its own sum: a loop that caches of instructions hold. A
  // block that passes through longer code once waits for it to arrive.
  __device__ static void run_few(const Params& params, const Place& place,
                                 const RequestTokens& tokens, const Staged& staged, State& state) {
    Tile& tile = *staged.tile;
    const int32_t row = Place::row_in_block();
#pragma unroll 1
    for (int32_t t = 0; t < staged.count; ++t) {
      const int32_t token = staged.first + t;
      Vectors vectors;
      tile.load(t, place.column, vectors);
      float values[Shape::kRows], reads[Shape::kRows];
#pragma unroll
      for (int r = 0; r < Shape::kRows; ++r) values[r] = tile.values[t][row + r * Shape::kStep];
      if (tokens.is_replayed(token)) {
        Step::replay(state.rows, vectors, staged.factors[t], values);
      } else {
        if constexpr (Step::kHasDeltaRule) __syncwarp();  // all lanes have read the values
        leave_changes(place, tile, t, Step::update(state.rows, vectors, staged.factors[t], values));
#pragma unroll
        for (int r = 0; r < Shape::kRows; ++r) reads[r] = state.rows[r].partial_dot(vectors.out);
        sum_over_lanes<Shape>(reads);
        if (place.column == 0) {
#pragma unroll
          for (int r = 0; r < Shape::kRows; ++r) {
            store_result(
                params, place, token, r,
                Step::result_of(params, place.head, staged.factors[t].out, values[r], reads[r]));
          }
        }
      }
      finish_token(params, place, tokens, token, state);
    }
  }

  // Any number of tokens: the next tile is copied while one is computed.
  __device__ static void run_tokens(const Params& params, const Place& place,
                                    const RequestTokens& tokens, State& state) {
    __shared__ __align__(16) Tile tiles[2];
    __shared__ TokenFactors factors[Shape::kTile];
    const int32_t begin = tokens.begin(), end = tokens.span.end;
    tiles[0].start_copies(params, place, tokens, begin);
    commit_copies();
#pragma unroll 1
    for (int32_t first = begin, at = 0; first < end; first += Shape::kTile, at ^= 1) {
      if (first + Shape::kTile < end) {
        tiles[at ^ 1].start_copies(params, place, tokens, first + Shape::kTile);
      }
      commit_copies();
      wait_copies<1>();
      __syncthreads();
      if (tokens.drafts.drafts > 0) {
        tiles[at].keep_drafts(params, place, tokens, first);
        if (Shape::kKind == kda) __syncthreads();  // its decays are replaced
      }
      // Eight lanes find the factors of a token.
      const auto own = static_cast<int32_t>(threadIdx.x) / Shape::kRowLanes % Shape::kTile;
      const TokenFactors found = tiles[at].prepare(params, own, place.column);
      if (place.column == 0) factors[own] = found;
      __syncthreads();
      const int32_t count = min(Shape::kTile, end - first);
      const Staged staged = {&tiles[at], factors, first, count};
      if constexpr (Shape::kTokens == few) {
        run_few(params, place, tokens, staged, state);
      } else {
        int32_t replayed = 0;
        if constexpr (Step::kHasDeltaRule) {
          replayed = replay_tokens(params, place, tokens, staged, state);
        }
        run_tile(params, place, tokens, staged, replayed, state);
      }
      if (Step::kHasDeltaRule && tokens.drafts.drafts > 0) {
        tiles[at].keep_changes(params, place, tokens, first);
      }
      __syncthreads();
    }
  }

  __device__ static void run(const Params& params) {
    if (!params.state_is_ready) wait_for_previous_kernel();
    const Place place(params);
    const StateSpan span = params.plan.spans[blockIdx.y];
    RequestTokens tokens = {span};
    if (params.plan.drafts) tokens.drafts = params.plan.drafts[blockIdx.y];
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
      // Without a token before the drafts, the state stays. A new one is written once.
      const bool is_new = span.from_zero && tokens.first_draft() == span.begin;
      if (is_new) state.store(params, place, span.slot);
      if constexpr (Shape::kTokens == one) {
        for (int32_t token = tokens.begin(); token < span.end; ++token) {
          run_token(params, place, tokens, token, state);
        }
      } else {
        run_tokens(params, place, tokens, state);
      }
      if (tokens.drafts.drafts == 0) state.store(params, place, span.slot);
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
