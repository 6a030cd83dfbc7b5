// SPDX-License-Identifier: Apache-2.0
// Stores of a pass's drafts in the rows that slots keep.
#pragma once

#include "kernels/cuda/sm90/recurrent_drafts/config.cuh"

namespace fovea::kernels::cuda {

template <class Shape>
struct KeepDrafts {
  using Params = RecurrenceParams;
  using Unit = DraftsUnit<Shape>;
  using Staged = StagedTokens<Shape>;
  using Vectors = TokenVectors<Shape>;
  using Step = RecurrenceStep<Shape>;
  static constexpr int kThreads = Shape::kWarps * 32;

  __device__ static int lane_column() {
    return static_cast<int>(threadIdx.x) % Shape::kRowLanes * 4;
  }

  // Keeps the unit's part of the vectors and gates of a draft, which eight lanes have. Units of a
  // head share its gates, heads of a group share keys: the first one keeps these.
  __device__ static void keep_vectors(const Params& params, const Unit& unit, int32_t token,
                                      const Vectors& vectors, float log_decay, float strength) {
    if (unit.row > 0) return;
    float* const row = unit.tokens.kept_row(params.kept, token);
    if (params.keeps_mixed && unit.head == unit.key_head * params.key_group) {
      vectors.in.template store_as<f32>(row + params.in_at + unit.key_head * Shape::kColumns +
                                        lane_column());
    }
    if constexpr (Shape::kKind == lightning) return;
    float* const decays = row + TokenPlace<Shape>::decays_at(params, unit);
    if constexpr (Staged::kHasDecays) {
      vectors.decays.template store_as<f32>(decays + lane_column());
    } else if (lane_column() == 0) {
      *decays = log_decay;
    }
    if (lane_column() == 0) row[params.kept.betas_at + unit.head] = strength;
  }
  __device__ static void keep_values(const Params& params, const Unit& unit, StagedRange range,
                                     const Staged& staged) {
    const int32_t first = range.first, count = range.count;
    constexpr int kFours = Shape::kBlockRows / 4;
    const RequestTokens& tokens = unit.tokens;
    const int32_t draft = max(tokens.first_draft() - first, 0);
#pragma unroll 1
    for (int32_t i = kThreads - 1 - static_cast<int32_t>(threadIdx.x) + draft * kFours;
         i < count * kFours; i += kThreads) {
      const int32_t t = i / kFours, at = i % kFours * 4;
      float* const row = tokens.kept_row(params.kept, first + t);
      *reinterpret_cast<float4*>(row + params.values_at + unit.head * params.rows + unit.row + at) =
          *reinterpret_cast<const float4*>(&staged.values[t][at]);
    }
  }

  // Keeps the changes of drafts, of the rows of a warp, whose tokens are done.
  __device__ static void keep_changes(const Params& params, const Unit& unit, StagedRange range,
                                      const Staged& staged) {
    constexpr int kWarpRows = Shape::kStep * Shape::kRows;
    constexpr int kTogether = 32 / kWarpRows;
    const int32_t first = range.first, count = range.count;
    const auto thread = static_cast<int32_t>(threadIdx.x);
    const int32_t row = thread / 32 * kWarpRows + thread % kWarpRows;
    __syncwarp();
#pragma unroll 1
    for (int32_t t = max(unit.tokens.first_draft() - first, 0) + thread % 32 / kWarpRows; t < count;
         t += kTogether) {
      float* const changes = unit.tokens.kept_row(params.kept, first + t) + params.kept.changes_at;
      changes[unit.head * params.rows + unit.row + row] = staged.values[t][row];
    }
  }
};

}  // namespace fovea::kernels::cuda
