// SPDX-License-Identifier: Apache-2.0
// Divisions for planners, whose time is that of a chain of dependent instructions. They round down
// and take numbers that are not negative.
#pragma once

#include "kernels/cuda/common/types.cuh"

namespace fovea::kernels::cuda {

// Divides small numbers in half the time of the compiler's division.
__device__ inline int quotient(int value, int by) {
  int result = static_cast<int>(__fdividef(static_cast<float>(value), static_cast<float>(by)));
  while (static_cast<int64_t>(result) * by > value) --result;
  while (static_cast<int64_t>(result + 1) * by <= value) ++result;
  return result;
}

// Corrects an estimated quotient that is off by one at most. There is no loop because
// sm90/joint_plan must stay small: it runs once a pass, from cold instruction caches.
__device__ inline int put_right(int estimate, int value, int by) {
  const int rest = value - estimate * by;
  return estimate + (rest >= by) - (rest < 0);
}

// As quotient() but without 64-bit products, for numbers below 2^30 with a quotient below 2^21.
// Rounding both numbers to floats and the 2 ulp error of the division change the estimate by less
// than one. Decode's kernels spill registers if they use it.
__device__ inline int short_quotient(int value, int by) {
  return put_right(static_cast<int>(__fdividef(static_cast<float>(value), static_cast<float>(by))),
                   value, by);
}

// Avoids the slow 64-bit division if both numbers have 32 bits, as they usually do.
__device__ inline int64_t quotient(int64_t value, int64_t by) {
  return (value | by) >> 32 ? value / by : static_cast<uint32_t>(value) / static_cast<uint32_t>(by);
}

}  // namespace fovea::kernels::cuda
