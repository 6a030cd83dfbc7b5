// SPDX-License-Identifier: Apache-2.0
// What blocks of a cluster say and bring to each other. PTX ISA 8, sm_90.
#pragma once

#include "kernels/cuda/common/hopper.cuh"

namespace fovea::kernels::cuda {

// Everything before the arrival of any thread of the cluster comes before what follows its wait.
__device__ inline void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
// Without that order, and the fence that makes it.
__device__ inline void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ inline void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ inline int cluster_rank() {
  int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Arrives at the barrier in this place of block `rank`, maybe the own, behind reads that are
// complete; makes no writes seen. A release to the cluster waits for all of the GPU to see what
// this thread wrote: MLA decode over fp8 rows took 320 us with it, 283 without, and prefill by
// pairs of blocks lost a quarter (2026-11-22).
__device__ inline void arrive_in_cluster(TransactionBarrier& barrier, uint32_t rank) {
  asm volatile(
      "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [there];\n}" ::"r"(
          shared_address(&barrier)),
      "r"(rank)
      : "memory");
}

// Puts `value` where `here` is in block `rank`, and counts its bytes at its `barrier`.
__device__ inline void store_in_cluster(int32_t* here, uint32_t rank, int32_t value,
                                        TransactionBarrier& barrier) {
  asm volatile(
      "{\n.reg .b32 there, full;\nmapa.shared::cluster.u32 there, %0, %1;\n"
      "mapa.shared::cluster.u32 full, %3, %1;\n"
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [there], %2, [full];\n}" ::
          "r"(shared_address(here)),
      "r"(rank), "r"(value), "r"(shared_address(&barrier))
      : "memory");
}
__device__ inline void store_in_cluster(float* here, uint32_t rank, float2 value,
                                        TransactionBarrier& barrier) {
  asm volatile(
      "{\n.reg .b32 there, full;\nmapa.shared::cluster.u32 there, %0, %1;\n"
      "mapa.shared::cluster.u32 full, %4, %1;\n"
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [there], {%2, %3}, "
      "[full];\n}" ::"r"(shared_address(here)),
      "r"(rank), "f"(value.x), "f"(value.y), "r"(shared_address(&barrier))
      : "memory");
}
__device__ inline void store_in_cluster(float* here, uint32_t rank, const float4& value,
                                        TransactionBarrier& barrier) {
  asm volatile(
      "{\n.reg .b32 there, full;\nmapa.shared::cluster.u32 there, %0, %1;\n"
      "mapa.shared::cluster.u32 full, %6, %1;\n"
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [there], {%2, %3, %4, "
      "%5}, [full];\n}" ::"r"(shared_address(here)),
      "r"(rank), "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w),
      "r"(shared_address(&barrier))
      : "memory");
}

// The address in block `rank` of what is at `here`.
__device__ __forceinline__ uint32_t address_in_cluster(const void* here, uint32_t rank) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(there)
               : "r"(shared_address(here)), "r"(rank));
  return there;
}
// Puts four words at an address of another block's, and counts their bytes at its barrier.
__device__ __forceinline__ void store_in_cluster(uint32_t there, const uint32_t (&words)[4],
                                                 uint32_t barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(there),
      "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]), "r"(barrier)
      : "memory");
}

// Copies `bytes` at `here` to the same place in block `rank`, and counts them at its `barrier`. One
// thread, after a fence of the async proxy if others stored them.
__device__ inline void copy_in_cluster(void* here, uint32_t rank, int bytes,
                                       TransactionBarrier& barrier) {
  asm volatile(
      "{\n.reg .b32 there, full;\nmapa.shared::cluster.u32 there, %0, %1;\n"
      "mapa.shared::cluster.u32 full, %3, %1;\n"
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [there], [%0], %2, "
      "[full];\n}" ::"r"(shared_address(here)),
      "r"(rank), "r"(bytes), "r"(shared_address(&barrier))
      : "memory");
}
// The same from `from` to where `there` is in block `rank`.
__device__ __forceinline__ void copy_in_cluster(const void* from, void* there, uint32_t rank,
                                                int bytes, TransactionBarrier& barrier) {
  asm volatile(
      "{\n.reg .b32 to, full;\nmapa.shared::cluster.u32 to, %1, %2;\n"
      "mapa.shared::cluster.u32 full, %4, %2;\n"
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [to], [%0], %3, "
      "[full];\n}" ::"r"(shared_address(from)),
      "r"(shared_address(there)), "r"(rank), "r"(bytes), "r"(shared_address(&barrier))
      : "memory");
}

// One box of a tensor to this place in both blocks of a cluster of two, each of which counts its
// bytes at its `barrier`.
__device__ inline void load_box_to_pair(void* shared, const TensorMap& map,
                                        TransactionBarrier& barrier, int c0, int c1, int c2,
                                        int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::"
      "cluster "
      "[%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(shared_address(shared)),
      "l"(&map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(shared_address(&barrier)),
      "h"(uint16_t{0b11})
      : "memory");
}

}  // namespace fovea::kernels::cuda
