// SPDX-License-Identifier: Apache-2.0
// Copies of a request's tokens to shared memory, and of its drafts to the rows that slots keep. A
// warp takes a place, a lane four columns.
#pragma once

#include "kernels/cuda/sm90/draft_products/config.cuh"

namespace fovea::kernels::cuda {

template <class Shape>
struct LoadTokens {
  using Params = RecurrenceParams;
  using Memory = ProductsMemory<Shape>;
  using Unit = ProductsUnit<Shape>;
  static_assert(Shape::kColumns == 32 * 4);

  __device__ static int32_t warp() { return static_cast<int32_t>(threadIdx.x) / 32; }
  // As warp(), for branches that the compiler should know to be those of whole warps.
  __device__ static int32_t whole_warp() { return __shfl_sync(~0u, warp(), 0); }
  __device__ static int32_t lane() { return static_cast<int32_t>(threadIdx.x) % 32; }
  // The lane's eighth in operands, which is a row or a vector, and its place among the four of it.
  __device__ static int32_t eighth() { return lane() / 4; }
  __device__ static int32_t fourth() { return lane() % 4; }
  __device__ static bool has_values(const Unit& unit) { return lane() * 4 < unit.rows; }

  // The addresses of a place's values, of the lane's columns and rows where there are several.
  struct Source {
    const float *in, *out, *values, *log_decay, *strength;
  };
  __device__ static void start_place(const Unit& unit, const Source& from, int32_t place,
                                     int32_t index, Memory& shared) {
    const int32_t column = lane() * 4;
    copy_async(&shared.in[place][column], from.in, 16);
    if (index >= 0) copy_async(&shared.out[index][column], from.out, 16);
    if (has_values(unit)) copy_async(&shared.values[place][column], from.values, 16);
    if constexpr (Shape::kHasDecays) {
      copy_async(&shared.columns.of[place][column], from.log_decay, 16);
    }
    if (lane() != 31) return;
    if constexpr (!Shape::kHasDecays) {
      copy_word_async(&shared.log_decay[place], from.log_decay, 4);
    }
    if constexpr (Shape::kKind != lightning) {
      copy_word_async(&shared.strength[place], from.strength, 4);
    }
  }
  // Starts the copies. Places without a token keep what they have.
  __device__ static void start(const Params& params, const Unit& unit, const TokenPlaces& places,
                               Memory& shared) {
    const int32_t column = lane() * 4, head = unit.head;
    const int32_t in_at = params.in_at + unit.key_head * Shape::kColumns + column;
    const int32_t out_at = params.out_at + unit.key_head * Shape::kColumns + column;
    const int32_t row_at = head * params.rows + unit.row + column;
    const int32_t decays = Shape::kHasDecays ? Shape::kColumns : 1;  // a token and head has them
    const int32_t decay_at = head * decays + (Shape::kHasDecays ? column : 0);
    const float* const head_decay = params.log_decay + head;  // lightning
    const int32_t first = whole_warp();
#pragma unroll 1
    for (int32_t i = first; i < places.replayed; i += Shape::kWarps) {
      const float* const row = unit.tokens.kept_row(params.kept, unit.tokens.begin() + i);
      const int32_t values_at = Shape::kHasDeltaRule ? params.kept.changes_at : params.values_at;
      const float* const log_decay = row + params.kept.decays_at + decay_at;
      start_place(
          unit,
          {row + in_at, nullptr, row + values_at + row_at,
           Shape::kKind == lightning ? head_decay : log_decay, row + params.kept.betas_at + head},
          i, -1, shared);
    }
#pragma unroll 1
    for (int32_t i = first ^ Shape::kWarps / 2; i < places.end - places.first_new;
         i += Shape::kWarps) {
      const int64_t token = unit.tokens.span.begin + i;
      const float* const row = params.mixed + token * params.mixed_stride;
      const float* const log_decay = params.log_decay + token * (params.heads * decays) + decay_at;
      start_place(unit,
                  {row + in_at, row + out_at, row + params.values_at + row_at,
                   Shape::kKind == lightning ? head_decay : log_decay,
                   params.strength + token * params.heads + head},
                  places.first_new + i, i, shared);
    }
  }

  __device__ static void copy_four(float* to, const float* from) {
    *reinterpret_cast<float4*>(to) = *reinterpret_cast<const float4*>(from);
  }

  // Keeps the unit's part of a draft's inputs. Units of a head share its gates, heads of a group
  // share keys: the first one keeps these.
  __device__ static void keep(const Params& params, const Unit& unit, int32_t token, int32_t place,
                              const Memory& shared) {
    float* const row = unit.tokens.kept_row(params.kept, token);
    const int32_t column = lane() * 4;
    if (!Shape::kHasDeltaRule && params.keeps_mixed && has_values(unit)) {
      copy_four(row + params.values_at + unit.head * params.rows + unit.row + column,
                &shared.values[place][column]);
    }
    if (unit.row > 0) return;
    if (params.keeps_mixed && unit.head == unit.key_head * params.key_group) {
      copy_four(row + params.in_at + unit.key_head * Shape::kColumns + column,
                &shared.in[place][column]);
    }
    if constexpr (Shape::kKind == lightning) return;
    float* const decays = row + TokenPlace<Shape>::decays_at(params, unit);
    if constexpr (Shape::kHasDecays) {
      copy_four(decays + column, &shared.columns.of[place][column]);
    } else if (lane() == 0) {
      *decays = shared.log_decay[place];
    }
    if (lane() == 0) row[params.kept.betas_at + unit.head] = shared.strength[place];
  }
  __device__ static void keep_drafts(const Params& params, const Unit& unit,
                                     const TokenPlaces& places, const Memory& shared) {
    const int32_t first_draft =
        places.first_new + unit.tokens.first_draft() - unit.tokens.span.begin;
#pragma unroll 1
    for (int32_t i = whole_warp(); i < places.end; i += Shape::kWarps) {
      if (i >= first_draft) keep(params, unit, unit.token_at(places, i), i, shared);
    }
  }
};

}  // namespace fovea::kernels::cuda
