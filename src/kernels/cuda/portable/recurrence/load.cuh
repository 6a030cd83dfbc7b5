// SPDX-License-Identifier: Apache-2.0
// The values of a thread: its part of a state and of a token's vectors; tokens in shared memory.
#pragma once

#include "kernels/cuda/common/division.cuh"
#include "kernels/cuda/common/recurrent_tokens.cuh"
#include "kernels/cuda/portable/recurrence/config.cuh"

namespace fovea::kernels::cuda {

// The head, the rows and the columns of a thread.
template <class Shape>
struct StatePlace : HeadPlace {
  int32_t row;     // the first of the thread; the others follow at intervals of kStep
  int32_t column;  // the first of the thread; the others follow at intervals of 4 * kRowLanes

  __device__ explicit StatePlace(const RecurrenceParams& params) {
    const auto block = static_cast<int32_t>(blockIdx.x);
    head = short_quotient(block, params.tiles);
    key_head = short_quotient(head, params.key_group);
    row = (block - head * params.tiles) * Shape::kBlockRows + row_in_block();
    column = static_cast<int32_t>(threadIdx.x) % Shape::kRowLanes * 4;
  }

  // The first row of the block, and the place of this thread's first row in it.
  __device__ int32_t first_row() const { return row - row_in_block(); }
  __device__ static int32_t row_in_block() {
    const auto thread = static_cast<int32_t>(threadIdx.x);
    return thread / 32 * (Shape::kStep * Shape::kRows) + thread % 32 / Shape::kRowLanes;
  }
};

// The rows of a thread.
template <class Shape>
struct StateRows {
  LaneValues<Shape> rows[Shape::kRows];

  __device__ static bool exists(const RecurrenceParams& params, const StatePlace<Shape>& place,
                                int r) {
    return place.row + r * Shape::kStep < params.rows;
  }
  // Returns the index of the thread's first value in a slot.
  __device__ static int64_t index(const RecurrenceParams& params, const StatePlace<Shape>& place,
                                  int32_t slot) {
    return slot * params.state_slot_stride +
           static_cast<int64_t>(place.head * params.rows + place.row) * params.columns +
           place.column;
  }
  // Calls body(row, index of its first value in the pool, values of the lane from there on).
  template <typename Body>
  __device__ void for_rows(const RecurrenceParams& params, const StatePlace<Shape>& place,
                           int32_t slot, Body body) {
    const int64_t first = index(params, place, slot);
#pragma unroll
    for (int r = 0; r < Shape::kRows; ++r) {
      body(rows[r], first + int64_t{r} * Shape::kStep * params.columns,
           exists(params, place, r) ? params.columns - place.column : 0);
    }
  }

  __device__ void clear() {
#pragma unroll
    for (int r = 0; r < Shape::kRows; ++r) rows[r].clear();
  }
  __device__ void load(const RecurrenceParams& params, const StatePlace<Shape>& place,
                       int32_t slot) {
    for_rows(params, place, slot, [&](LaneValues<Shape>& row, int64_t at, int32_t count) {
      if (params.state_type == StateType::f32) {
        row.template load_as<f32>(static_cast<const float*>(params.state) + at, count);
      } else if (params.state_type == StateType::bf16) {
        row.template load_as<bf16>(static_cast<const uint16_t*>(params.state) + at, count);
      } else {
        row.template load_as<f16>(static_cast<const uint16_t*>(params.state) + at, count);
      }
    });
  }
  __device__ void store(const RecurrenceParams& params, const StatePlace<Shape>& place,
                        int32_t slot) {
    for_rows(params, place, slot, [&](LaneValues<Shape>& row, int64_t at, int32_t count) {
      if (params.state_type == StateType::f32) {
        row.template stream_as<f32>(static_cast<float*>(params.state) + at, count);
      } else if (params.state_type == StateType::bf16) {
        row.template stream_as<bf16>(static_cast<uint16_t*>(params.state) + at, count);
      } else {
        row.template stream_as<f16>(static_cast<uint16_t*>(params.state) + at, count);
      }
    });
  }
  // Rounds the values to their type in memory.
  __device__ void round(const RecurrenceParams& params) {
    if (params.state_type == StateType::f32) return;
#pragma unroll
    for (int r = 0; r < Shape::kRows; ++r) {
      if (params.state_type == StateType::bf16) {
        rows[r].template round<bf16>();
      } else {
        rows[r].template round<f16>();
      }
    }
  }
};

// Keeps the block's part of the inputs of a draft. Blocks of a head share its gates, blocks of
// several heads share keys: the first one stores these.
template <class Shape>
__device__ __noinline__ void keep_draft(const RecurrenceParams& params, StatePlace<Shape> place,
                                        RequestTokens tokens, int32_t token, TokenValues from) {
  float* const row = tokens.kept_row(params.kept, token);
  const int32_t first_row = place.first_row();
  const auto keep = [&](const float* values, int32_t count, int32_t at) {
    for (int32_t i = threadIdx.x; i < count; i += 32 * Shape::kWarps) row[at + i] = values[i];
  };
  if (params.keeps_mixed && !RecurrenceStep<Shape>::kHasDeltaRule) {
    keep(from.values, min(Shape::kBlockRows, params.rows - first_row),
         params.values_at + place.head * params.rows + first_row);
  }
  if (first_row > 0) return;
  if (params.keeps_mixed && place.head == place.key_head * params.key_group) {
    keep(from.in, params.columns, params.in_at + place.key_head * params.columns);
  }
  if constexpr (Shape::kKind == lightning) return;
  keep(from.log_decay, Shape::kKind == kda ? params.columns : 1,
       TokenPlace<Shape>::decays_at(params, place));
  keep(from.strength, 1, params.kept.betas_at + place.head);
}

// Tokens in shared memory.
template <class Shape>
struct TokenTile {
  using Step = RecurrenceStep<Shape>;
  static constexpr int kWidth = Shape::kRowLanes * Shape::kValues;       // columns with padding
  static_assert(Shape::kTile * Shape::kRowLanes <= 32 * Shape::kWarps);  // lanes for the factors

  static constexpr bool kHasDecays = Shape::kKind == kda;  // for each column

  float in[Shape::kTile][kWidth], out[Shape::kTile][kWidth];
  float values[Shape::kTile][Shape::kBlockRows];  // changes of tokens that are done
  float log_decay[Shape::kTile], strength[Shape::kTile];
  alignas(16) float decays[kHasDecays ? Shape::kTile : 1][kHasDecays ? kWidth : 1];

  // Starts the copies of up to kTile tokens from `first` on; columns and rows that do not exist
  // become 0.
  __device__ void start_copies(const RecurrenceParams& params, const StatePlace<Shape>& place,
                               const RequestTokens& tokens, int32_t first) {
    constexpr int kThreads = 32 * Shape::kWarps;
    constexpr int kFours = kWidth / 4;
    const auto thread = static_cast<int32_t>(threadIdx.x);
    const int32_t count = min(Shape::kTile, tokens.span.end - first);
    const int32_t first_row = place.first_row();
    for (int32_t i = thread; i < count * kFours; i += kThreads) {
      const TokenPlace<Shape> from(params, place, tokens, first_row, first + i / kFours);
      const int32_t column = i % kFours * 4;
      const bool live = column < params.columns;
      const int bytes = live ? 16 : 0;
      copy_async(&in[i / kFours][column], from.in + (live ? column : 0), bytes);
      copy_async(&out[i / kFours][column], from.out + (live ? column : 0), bytes);
      if constexpr (kHasDecays) {
        copy_async(&decays[i / kFours][column], from.log_decay + (live ? column : 0), bytes);
      }
    }
    for (int32_t i = thread; i < count * Shape::kBlockRows; i += kThreads) {
      const TokenPlace<Shape> from(params, place, tokens, first_row, first + i / Shape::kBlockRows);
      const int32_t row = i % Shape::kBlockRows;
      const bool live = first_row + row < params.rows;
      copy_word_async(&values[i / Shape::kBlockRows][row], from.values + (live ? row : 0),
                      live ? 4 : 0);
    }
    if (thread < count) {
      const TokenPlace<Shape> from(params, place, tokens, first_row, first + thread);
      if constexpr (!kHasDecays) copy_word_async(&log_decay[thread], from.log_decay, 4);
      if constexpr (Shape::kKind != lightning) {
        copy_word_async(&strength[thread], from.strength, 4);
      }
    }
  }

  // Keeps the drafts of the tile, whose token 0 is `first`.
  __device__ void keep_drafts(const RecurrenceParams& params, const StatePlace<Shape>& place,
                              const RequestTokens& tokens, int32_t first) const {
    const int32_t end = min(Shape::kTile, tokens.span.end - first);
#pragma unroll 1
    for (int32_t t = max(tokens.first_draft() - first, 0); t < end; ++t) {
      keep_draft<Shape>(
          params, place, tokens, first + t,
          {in[t], nullptr, values[t], kHasDecays ? decays[t] : &log_decay[t], &strength[t]});
    }
  }

  // Keeps the changes of drafts, of the rows of a warp, whose tokens are done.
  __device__ void keep_changes(const RecurrenceParams& params, const StatePlace<Shape>& place,
                               const RequestTokens& tokens, int32_t first) const {
    constexpr int kWarpRows = Shape::kStep * Shape::kRows;
    const auto thread = static_cast<int32_t>(threadIdx.x);
    const int32_t at = thread / 32 * kWarpRows + thread % 32, row = place.first_row() + at;
    const int32_t end = min(Shape::kTile, tokens.span.end - first);
    __syncwarp();
    if (thread % 32 >= kWarpRows || row >= params.rows) return;
#pragma unroll 1
    for (int32_t t = max(tokens.first_draft() - first, 0); t < end; ++t) {
      float* const changes = tokens.kept_row(params.kept, first + t) + params.kept.changes_at;
      changes[place.head * params.rows + row] = values[t][at];
    }
  }

  // Reads the vectors of token t from the lane's first column on.
  __device__ void load(int32_t t, int32_t column, TokenVectors<Shape>& vectors) const {
    vectors.in.load(in[t] + column);
    vectors.out.load(out[t] + column);
    if constexpr (kHasDecays) vectors.decays.load(decays[t] + column);
  }
  // Returns the factors of token t, and replaces its log decays by decays. Eight lanes call this
  // with the same t.
  __device__ TokenFactors prepare(const RecurrenceParams& params, int32_t t, int32_t column) {
    TokenVectors<Shape> vectors;
    load(t, column, vectors);
    if constexpr (kHasDecays) {
      vectors.exponentiate();
      if (static_cast<int32_t>(threadIdx.x) / Shape::kRowLanes == t) {
        vectors.decays.template store_as<f32>(decays[t] + column);
      }
    }
    return Step::factors_of(params, vectors, kHasDecays ? 0.0f : log_decay[t],
                            Shape::kKind == lightning ? 1.0f : strength[t]);
  }
};

}  // namespace fovea::kernels::cuda
