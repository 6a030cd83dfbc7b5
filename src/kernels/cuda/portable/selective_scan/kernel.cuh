// SPDX-License-Identifier: Apache-2.0
// The selective scan of Mamba1, token by token. A block takes channels of one request: it reads
// their states and the constants A once, keeps both in registers for all tokens of the request and
// writes the states once, and where a snapshot is asked for.
//
//   grid: x = (group of B and C, tile of kBlockRows channels), y = request
//   warp: kStep channels; kRowLanes lanes share a channel
//
// Every sum has one order, so a sequence has the same bits in one piece, in chunks, token by token
// and among other requests.
#pragma once

#include "kernels/cuda/portable/selective_scan/config.cuh"

namespace fovea::kernels::cuda {

// Tokens in shared memory.
template <class Shape>
struct ScanTile {
  static constexpr int kWidth = Shape::kRowLanes * Shape::kValues;  // columns with padding

  float in[Shape::kTile][kWidth], out[Shape::kTile][kWidth];
  float values[Shape::kTile][Shape::kBlockRows], strengths[Shape::kTile][Shape::kBlockRows];

  // Starts the copies of up to kTile tokens from `first` on; columns and rows that do not exist
  // become 0.
  __device__ void start_copies(const RecurrenceParams& params, const StatePlace<Shape>& place,
                               int32_t first, int32_t end) {
    constexpr int kThreads = 32 * Shape::kWarps;
    constexpr int kFours = kWidth / 4;
    const auto thread = static_cast<int32_t>(threadIdx.x);
    const int32_t count = min(Shape::kTile, end - first);
    const float* const rows = params.mixed + first * params.mixed_stride;
    for (int32_t i = thread; i < count * kFours; i += kThreads) {
      const int32_t t = i / kFours, column = i % kFours * 4;
      const bool live = column < params.columns;
      const float* const from =
          rows + t * params.mixed_stride + place.key_head * params.columns + (live ? column : 0);
      copy_async(&in[t][column], from + params.in_at, live ? 16 : 0);
      copy_async(&out[t][column], from + params.out_at, live ? 16 : 0);
    }
    const int64_t first_row = static_cast<int64_t>(place.head) * params.rows + place.first_row();
    const int64_t all_rows = static_cast<int64_t>(params.heads) * params.rows;
    for (int32_t i = thread; i < count * Shape::kBlockRows; i += kThreads) {
      const int32_t t = i / Shape::kBlockRows, row = i % Shape::kBlockRows;
      const bool live = place.first_row() + row < params.rows;
      const int64_t at = first_row + (live ? row : 0);
      copy_word_async(&values[t][row], rows + t * params.mixed_stride + params.values_at + at,
                      live ? 4 : 0);
      copy_word_async(&strengths[t][row], params.strength + (first + t) * all_rows + at,
                      live ? 4 : 0);
    }
  }
};

template <class Shape>
struct SelectiveScanConfig {
  using Params = RecurrenceParams;
  using Place = StatePlace<Shape>;
  using State = StateRows<Shape>;
  using Values = LaneValues<Shape>;
  using Tile = ScanTile<Shape>;
  static constexpr int kBlocksPerSm = Shape::kBlocksPerSm;
  static constexpr KernelTraits kTraits = {Shape::kWarps * 32, 0, Shape::kBlockRows, 0};

  // A thread's part of a channel, for all tokens.
  struct Channel {
    Values a;
    float skip = 0;
    int64_t row;  // among all channels
    bool exists;

    __device__ Channel(const Params& params, const Place& place)
        : row(static_cast<int64_t>(place.head) * params.rows + place.row),
          exists(State::exists(params, place, 0)) {
      a.load(params.log_decay + row * params.columns + place.column,
             exists ? params.columns - place.column : 0);
      if (exists && params.skip) skip = params.skip[row];
    }
  };

  // The vectors of a token, its value and its strength for a channel.
  struct Token {
    Values in, out;
    float value, strength;
  };

  // Returns the result of the channel, of which every lane has the sum.
  __device__ static float step(const Channel& channel, const Token& token, Values& state) {
    const float change = __fmul_rn(token.strength, token.value);
#pragma unroll
    for (int i = 0; i < Shape::kValues; ++i) {
      const float decay = expf(__fmul_rn(token.strength, channel.a.at[i]));
      state.at[i] = __fmaf_rn(change, token.in.at[i], __fmul_rn(decay, state.at[i]));
    }
    float read[1] = {state.partial_dot(token.out)};
    sum_over_lanes<Shape>(read);
    return __fmaf_rn(channel.skip, token.value, read[0]);
  }

  __device__ static void finish_token(const Params& params, const Place& place,
                                      const Channel& channel, int32_t token, float result,
                                      State& state) {
    if (place.column == 0 && channel.exists) {
      params.result[token * params.result_stride + channel.row] = result;
    }
    state.round(params);
    if (params.plan.snapshot_slots == nullptr) return;
    const int32_t slot = params.plan.snapshot_slots[token];
    if (slot >= 0) state.store(params, place, slot);
  }

  // One token, straight from memory.
  __device__ static void run_token(const Params& params, const Place& place, const Channel& channel,
                                   int32_t token, State& state) {
    const float* const row = params.mixed + token * params.mixed_stride;
    const float* const vectors = row + place.key_head * params.columns + place.column;
    const int32_t columns = params.columns - place.column;
    Token own;
    own.in.load(vectors + params.in_at, columns);
    own.out.load(vectors + params.out_at, columns);
    const int64_t rows = static_cast<int64_t>(params.heads) * params.rows;
    own.value = channel.exists ? row[params.values_at + channel.row] : 0.0f;
    own.strength = channel.exists ? params.strength[token * rows + channel.row] : 0.0f;
    const float result = step(channel, own, state.rows[0]);
    finish_token(params, place, channel, token, result, state);
  }

  // Any number of tokens: the next tile is copied while one is computed.
  __device__ static void run_tokens(const Params& params, const Place& place,
                                    const Channel& channel, const StateSpan& span, State& state) {
    __shared__ __align__(16) Tile tiles[2];
    const int32_t row = Place::row_in_block();
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
      const Tile& tile = tiles[at];
      const int32_t count = min(Shape::kTile, span.end - first);
#pragma unroll 4
      for (int32_t t = 0; t < count; ++t) {
        Token token;
        token.in.load(tile.in[t] + place.column);
        token.out.load(tile.out[t] + place.column);
        token.value = tile.values[t][row];
        token.strength = tile.strengths[t][row];
        const float result = step(channel, token, state.rows[0]);
        finish_token(params, place, channel, first + t, result, state);
      }
      __syncthreads();
    }
  }

  __device__ static void run(const Params& params) {
    const Place place(params);
    const Channel channel(params, place);
    wait_for_previous_kernel();
    const StateSpan span = params.plan.spans[blockIdx.y];
    const bool runs = span.begin < span.end && span.slot >= 0;
    State state;
    if (runs && !span.from_zero) {
      state.load(params, place, span.slot);
    } else {
      state.clear();
    }
    allow_next_kernel();
    if (runs) {
      if constexpr (Shape::kTokens == one) {
        for (int32_t token = span.begin; token < span.end; ++token) {
          run_token(params, place, channel, token, state);
        }
      } else {
        run_tokens(params, place, channel, span, state);
      }
      state.store(params, place, span.slot);
      return;
    }
    if (place.column != 0 || !channel.exists) return;
    for (int32_t token = span.begin; token < span.end; ++token) {
      params.result[token * params.result_stride + channel.row] = 0;
    }
  }
};

template <int kColumns, TokenCount kTokens>
using Config = SelectiveScanConfig<ScanShape<kColumns, kTokens>>;

}  // namespace fovea::kernels::cuda
