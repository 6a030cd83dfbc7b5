// SPDX-License-Identifier: Apache-2.0
// Running sums over the threads of a block of up to 32 warps, for planners.
#pragma once

namespace fovea::kernels::cuda {

template <typename T>
struct ScanMemory {
  T warp_totals[32];
};

// Returns the sum of `value` over this lane and all lower lanes.
template <typename T>
__device__ T warp_scan(T value) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const T before = __shfl_up_sync(~0u, value, step);
    if (lane >= step) value += before;
  }
  return value;
}

// Returns the sum of `value` over all lower threads; `total` becomes the sum over all threads.
template <typename T>
__device__ T exclusive_scan(T value, T& total, ScanMemory<T>& memory) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const T sum = warp_scan(value);
  __syncthreads();  // the memory may still be read from the last scan
  if (lane == 31) memory.warp_totals[warp] = sum;
  __syncthreads();
  // Every warp adds up the warps' totals for itself: cheaper than one more barrier.
  const T own = lane < static_cast<int>(blockDim.x / 32) ? memory.warp_totals[lane] : T{};
  const T warps = warp_scan(own);
  total = __shfl_sync(~0u, warps, 31);
  return __shfl_sync(~0u, warps - own, warp) + sum - value;
}

// As above for a block of kThreads, without the first barrier: the caller needs one before it uses
// the memory again.
template <typename T, int kThreads>
struct WarpTotals {
  alignas(16) T values[kThreads / 32];
};
template <int kThreads, typename T>
__device__ T exclusive_scan(T value, T& total, WarpTotals<T, kThreads>& memory) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const T sum = warp_scan(value);
  if (threadIdx.x % 32 == 31) memory.values[warp] = sum;
  __syncthreads();
  T before = sum - value;
  total = 0;
#pragma unroll
  for (int i = 0; i < kThreads / 32; ++i) {
    const T other = memory.values[i];
    if (i < warp) before += other;
    total += other;
  }
  return before;
}

}  // namespace fovea::kernels::cuda
