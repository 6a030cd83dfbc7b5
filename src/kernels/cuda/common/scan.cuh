// SPDX-License-Identifier: Apache-2.0
// Running sums over the 1024 threads of a block, as planners need them.
#pragma once

namespace fovea::kernels::cuda {

template <typename T>
struct ScanMemory {
  T warp_totals[32];
  T total;
};

// Sum of `value` over the threads before this one; `total` is that of all.
template <typename T>
__device__ T exclusive_scan(T value, T& total, ScanMemory<T>& memory) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  T sum = value;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const T before = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += before;
  }
  __syncthreads();  // the memory may still be read from the last scan
  if (lane == 31) memory.warp_totals[warp] = sum;
  __syncthreads();
  if (warp == 0) {
    const T own = memory.warp_totals[lane];
    T warps = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const T before = __shfl_up_sync(~0u, warps, step);
      if (lane >= step) warps += before;
    }
    memory.warp_totals[lane] = warps - own;
    if (lane == 31) memory.total = warps;
  }
  __syncthreads();
  total = memory.total;
  return memory.warp_totals[warp] + sum - value;
}

}  // namespace fovea::kernels::cuda
