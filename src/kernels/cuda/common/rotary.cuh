// SPDX-License-Identifier: Apache-2.0
// Rotary positions of one head. Products and sums are rounded one by one, so that a head has the
// bits the CPU gives it.
#pragma once

#include "kernels/cuda/common/rotary.h"

namespace fovea::kernels::cuda {

// Where value `at` of a head stands: in which pair, as its first or second, and where the other is.
struct RotaryPlace {
  int pair;
  int other;
  bool second;
};

__device__ inline RotaryPlace rotary_place(const RotaryParams& rotary, int at) {
  if (rotary.interleaved) return {at / 2, at ^ 1, at % 2 == 1};
  const int pairs = rotary.rotary_dim / 2;
  if (at < pairs) return {at, at + pairs, false};
  return {at - pairs, at - pairs, true};
}

// First entry of a position in the tables.
__device__ inline int64_t rotary_row(const RotaryParams& rotary, int position) {
  const bool known = position >= 0 && position < rotary.max_positions;
  return static_cast<int64_t>(known ? position : 0) * (rotary.rotary_dim / 2);
}

__device__ inline float rotated(const RotaryPlace& place, float value, float other, float cos,
                                float sin) {
  const float own = __fmul_rn(value, cos);
  const float turned = __fmul_rn(other, sin);
  return place.second ? __fadd_rn(own, turned) : __fsub_rn(own, turned);
}

}  // namespace fovea::kernels::cuda
