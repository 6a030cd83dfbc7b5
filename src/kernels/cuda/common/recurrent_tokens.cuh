// SPDX-License-Identifier: Apache-2.0
// The places of the inputs of a token that a recurrence computes.
#pragma once

#include "kernels/cuda/common/recurrence.cuh"
#include "kernels/cuda/common/request_tokens.cuh"

namespace fovea::kernels::cuda {

// The addresses of a token's values for a head and the rows from a first one on.
struct TokenValues {
  const float* in;         // [columns]
  const float* out;        // [columns]
  const float* values;     // from the first row on; replayed tokens of a delta rule: changes
  const float* log_decay;  // [1]; kda: [columns]
  const float* strength;   // [1]; not lightning
};

// A head of values, and the head of keys that it takes.
struct HeadPlace {
  int32_t head, key_head;
};

template <class Shape>
struct TokenPlace : TokenValues {
  __device__ TokenPlace(const RecurrenceParams& params, const HeadPlace& place,
                        const RequestTokens& tokens, int32_t first_row, int32_t token) {
    using Step = RecurrenceStep<Shape>;
    const int64_t gate = static_cast<int64_t>(token) * params.heads + place.head;
    const float* row = params.mixed + token * params.mixed_stride;
    log_decay = Shape::kKind == kda ? Step::column_decays(params, gate)
                                    : Step::log_decay_at(params, gate, place.head);
    strength = params.strength + gate;
    const bool is_replayed = tokens.is_replayed(token);
    if (is_replayed) {
      row = tokens.kept_row(params.kept, token);
      if (Shape::kKind != lightning) log_decay = row + decays_at(params, place);
      strength = row + params.kept.betas_at + place.head;
    }
    in = row + params.in_at + place.key_head * params.columns;
    // Replayed tokens have no result.
    out = is_replayed ? in : row + params.out_at + place.key_head * params.columns;
    values = row + place.head * params.rows + first_row +
             (is_replayed && Step::kHasDeltaRule ? params.kept.changes_at : params.values_at);
  }

  // Returns the place of a head's decays in a row of kept inputs.
  __device__ static int32_t decays_at(const RecurrenceParams& params, const HeadPlace& place) {
    return params.kept.decays_at + place.head * (Shape::kKind == kda ? params.columns : 1);
  }
};

}  // namespace fovea::kernels::cuda
