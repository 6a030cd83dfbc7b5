// SPDX-License-Identifier: Apache-2.0
// Barriers, stores and copies between the blocks of a cluster. PTX ISA 8, sm_90.
#pragma once

#include "kernels/cuda/common/hopper.cuh"

namespace fovea::kernels::cuda {

// Arrives at the barrier of the cluster. Writes that any thread makes before it arrives are visible
// to every thread after cluster_wait().
__device__ inline void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
// Arrives without a fence: earlier writes need not be visible after cluster_wait().
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

// Arrives at the barrier with the same address in block `rank`, which may be this block. Tells that
// block that this thread's reads are complete, but makes no writes visible: a release to the
// cluster would wait until the whole GPU sees this thread's writes, which is slow.
__device__ inline void arrive_in_cluster(TransactionBarrier& barrier, uint32_t rank) {
  asm volatile(
      "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [there];\n}" ::"r"(
          shared_address(&barrier)),
      "r"(rank)
      : "memory");
}

// Stores `value` at the address `here` of block `rank` and counts its bytes at that block's
// `barrier`.
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

// Returns the address in block `rank` that corresponds to `here` in this block.
__device__ __forceinline__ uint32_t address_in_cluster(const void* here, uint32_t rank) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(there)
               : "r"(shared_address(here)), "r"(rank));
  return there;
}
// Stores four words at an address of another block and counts their bytes at its barrier.
__device__ __forceinline__ void store_in_cluster(uint32_t there, const uint32_t (&words)[4],
                                                 uint32_t barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(there),
      "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]), "r"(barrier)
      : "memory");
}

// Copies `bytes` at `here` to the same address in block `rank` and counts them at that block's
// `barrier`. Called by one thread, after a fence of the async proxy if other threads stored the
// bytes.
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
// As above, from `from` to the address `there` in block `rank`.
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

// Copies one box of a tensor to the same address in both blocks of a cluster of two. Each block
// counts its bytes at its `barrier`.
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
