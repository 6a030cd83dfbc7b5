// SPDX-License-Identifier: Apache-2.0
// Rotary position embedding of one head. Every product and sum is rounded separately, so that the
// results have the same bits as on the CPU.
#pragma once

#include "kernels/cuda/common/rotary.h"

namespace fovea::kernels::cuda {

// The place of one value of a head: its pair, the index of the pair's other value, and whether it
// is the second of the pair.
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

// Returns the index of a position's first entry in the tables.
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
