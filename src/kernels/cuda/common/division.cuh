// SPDX-License-Identifier: Apache-2.0
// Divisions of a planner, whose time is that of a chain of dependent instructions. Rounded down, of
// what is not negative.
#pragma once

#include "kernels/cuda/common/types.cuh"

namespace fovea::kernels::cuda {

// Of small numbers: half the time of the compiler's.
__device__ inline int quotient(int value, int by) {
  int result = static_cast<int>(__fdividef(static_cast<float>(value), static_cast<float>(by)));
  while (static_cast<int64_t>(result) * by > value) --result;
  while (static_cast<int64_t>(result + 1) * by <= value) ++result;
  return result;
}

// The same without products of 64 bits, of numbers below 2^30. Decode's kernels spill with it.
__device__ inline int short_quotient(int value, int by) {
  int result = static_cast<int>(__fdividef(static_cast<float>(value), static_cast<float>(by)));
  int rest = value - result * by;
  for (; rest < 0; rest += by) --result;
  for (; rest >= by; rest -= by) ++result;
  return result;
}

// Of mostly small ones: divisions of 64 bits are slow.
__device__ inline int64_t quotient(int64_t value, int64_t by) {
  return (value | by) >> 32 ? value / by : static_cast<uint32_t>(value) / static_cast<uint32_t>(by);
}

}  // namespace fovea::kernels::cuda
