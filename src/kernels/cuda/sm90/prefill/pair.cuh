// SPDX-License-Identifier: Apache-2.0
// Two blocks of a cluster that take neighbouring row tiles as one: each copies half of the columns of K and V to
// both, so that L2 is read once. PTX ISA 8, sm_90.
#pragma once

#include "kernels/cuda/common/cluster.cuh"
#include "kernels/cuda/common/hopper.cuh"

namespace fovea::kernels::cuda {

__device__ inline int pair_rank() {
  int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Arrives at the barrier in this place of block `rank`, maybe the own. Not a release to the cluster, which becomes
// a fence of all memory: with one prefill is a quarter slower (H200, 2026-11-22). Only stages that the tensor cores
// have read are given back.
__device__ inline void give_back_in_pair(TransactionBarrier& barrier, int rank) {
  asm volatile(
      "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(shared_address(&barrier)),
      "r"(rank)
      : "memory");
}

// Puts `value` in this place of block `rank` and counts its 4 bytes at the `barrier` there.
__device__ inline void send_in_pair(int32_t& here, int rank, int32_t value, TransactionBarrier& barrier) {
  asm volatile(
      "{\n.reg .b32 there, full;\nmapa.shared::cluster.u32 there, %0, %1;\n"
      "mapa.shared::cluster.u32 full, %3, %1;\n"
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [there], %2, [full];\n}" ::"r"(
          shared_address(&here)),
      "r"(rank), "r"(value), "r"(shared_address(&barrier))
      : "memory");
}

// One box of a tensor to this place in both blocks, each of which counts its bytes at its `barrier`.
__device__ inline void load_box_to_pair(void* shared, const TensorMap& map, TransactionBarrier& barrier, int c0,
                                        int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(shared_address(shared)),
      "l"(&map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(shared_address(&barrier)), "h"(uint16_t{0b11})
      : "memory");
}

// Until the other block has come as far. All threads.
template <class Config>
__device__ __forceinline__ void meet_pair() {
  if constexpr (Config::kPairs) {
    __syncwarp();
    cluster_arrive();
    cluster_wait();
  }
}

}  // namespace fovea::kernels::cuda
