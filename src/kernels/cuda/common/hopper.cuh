// SPDX-License-Identifier: Apache-2.0
// Functions for single instructions of sm_90a: transaction barriers, bulk tensor copies, register
// reallocation, named barriers. PTX ISA 8.
#pragma once

#include "kernels/cuda/common/e4m3.cuh"
#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/common/tensor_map.h"

namespace fovea::kernels::cuda {

constexpr int kWarpgroupThreads = 128;

// Returns gridDim.x, read at this place in the program.
__device__ __forceinline__ int grid_blocks_anew() {
  int blocks;
  asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(blocks));
  return blocks;
}

// Returns true in one thread of the warp. Unlike the number of the lane, it takes no register.
__device__ __forceinline__ bool elect_lane() {
  uint32_t elected;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(elected));
  return elected;
}

// Converts the result of shared_address() to a pointer that the compiler knows is to shared memory.
__device__ __forceinline__ const void* shared_pointer(uint32_t address) {
  return __cvta_shared_to_generic(address);
}

// An mbarrier in shared memory. Phase parity: wait(0) returns after the first completion.
struct alignas(8) TransactionBarrier {
  uint64_t state;

  __device__ void init(int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(this)),
                 "r"(arrivals));
  }
  __device__ void arrive() {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(this)) : "memory");
  }
  // Arrives, and lets the phase complete only after copies of `bytes` more bytes.
  __device__ void arrive_expecting(int bytes) {
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(this)),
        "r"(bytes)
        : "memory");
  }
  // Arrives when this thread's earlier cp.async copies are complete; counts as one arrival.
  __device__ void arrive_after_copies() {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(this))
                 : "memory");
  }
  __device__ void wait(uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}\n" ::"r"(shared_address(this)),
        "r"(parity)
        : "memory");
  }
};

// Stores four 8x8 matrices of 16-bit elements in the layout of load_matrices().
__device__ inline void store_matrices(void* shared, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                   shared_address(shared)),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

__device__ inline void store_matrices_transposed(void* shared, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                   shared_address(shared)),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

// Makes initialised barriers visible to the copy engine.
__device__ inline void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// Orders this thread's ordinary accesses to shared memory before those of the copy engine and the
// tensor cores.
__device__ inline void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ inline void prefetch_tensor_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Eviction policies for the L2 lines that a copy reads, as createpolicy returns them for all lines.
constexpr uint64_t kEvictNormal = 0x1000000000000000ull;
constexpr uint64_t kEvictFirst = 0x12F0000000000000ull;
constexpr uint64_t kEvictLast = 0x14F0000000000000ull;

// Copies contiguous bytes, a multiple of 16, to shared memory.
__device__ inline void load_bytes(void* shared, const void* global, int bytes,
                                  TransactionBarrier& barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(&barrier))
      : "memory");
}
__device__ inline void load_bytes(void* shared, const void* global, int bytes,
                                  TransactionBarrier& barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1], %2, [%3], "
      "%4;" ::"r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(&barrier)), "l"(policy)
      : "memory");
}

// Copies one box of a tensor to shared memory. Coordinates begin with the innermost dimension;
// elements outside the tensor become zeros.
__device__ inline void load_box(void* shared, const TensorMap& map, TransactionBarrier& barrier,
                                int c0, int c1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, "
      "%3}], [%4];" ::"r"(shared_address(shared)),
      "l"(&map), "r"(c0), "r"(c1), "r"(shared_address(&barrier))
      : "memory");
}
__device__ inline void load_box(void* shared, const TensorMap& map, TransactionBarrier& barrier,
                                int c0, int c1, int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, "
      "%3, "
      "%4}], [%5];" ::"r"(shared_address(shared)),
      "l"(&map), "r"(c0), "r"(c1), "r"(c2), "r"(shared_address(&barrier))
      : "memory");
}
__device__ inline void load_box(void* shared, const TensorMap& map, TransactionBarrier& barrier,
                                uint64_t policy, int c0, int c1, int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, "
      "{%2, %3, %4}], [%5], %6;" ::"r"(shared_address(shared)),
      "l"(&map), "r"(c0), "r"(c1), "r"(c2), "r"(shared_address(&barrier)), "l"(policy)
      : "memory");
}
__device__ inline void load_box(void* shared, const TensorMap& map, TransactionBarrier& barrier,
                                uint64_t policy, int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, "
      "{%2, %3, %4, %5}], [%6], %7;" ::"r"(shared_address(shared)),
      "l"(&map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(shared_address(&barrier)), "l"(policy)
      : "memory");
}
// Copies a box to the L2 only; later writes to the box reach the L2 too.
__device__ inline void prefetch_box(const TensorMap& map, int c0, int c1, int c2, int c3) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global [%0, {%1, %2, %3, %4}];" ::"l"(&map),
               "r"(c0), "r"(c1), "r"(c2), "r"(c3)
               : "memory");
}
__device__ inline void prefetch_box(const TensorMap& map, uint64_t policy, int c0, int c1, int c2,
                                    int c3) {
  asm volatile(
      "cp.async.bulk.prefetch.tensor.4d.L2.global.L2::cache_hint [%0, {%1, %2, %3, %4}], %5;" ::"l"(
          &map),
      "r"(c0), "r"(c1), "r"(c2), "r"(c3), "l"(policy)
      : "memory");
}

__device__ inline void load_box(void* shared, const TensorMap& map, TransactionBarrier& barrier,
                                uint64_t policy, int c0, int c1, int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, "
      "{%2, %3, %4, %5, %6}], [%7], %8;" ::"r"(shared_address(shared)),
      "l"(&map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "r"(shared_address(&barrier)),
      "l"(policy)
      : "memory");
}
// Copies a box to the L2 only.
__device__ inline void prefetch_box(const TensorMap& map, int c0, int c1, int c2, int c3, int c4) {
  asm volatile("cp.async.bulk.prefetch.tensor.5d.L2.global [%0, {%1, %2, %3, %4, %5}];" ::"l"(&map),
               "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
               : "memory");
}

// Copies a box from shared memory to a tensor and skips elements outside the tensor.
// wait_stores_read() waits for groups of this thread's stores.
__device__ inline void store_box(const TensorMap& map, const void* shared, int c0, int c1, int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(&map),
      "r"(shared_address(shared)), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}
// Copies contiguous bytes, a multiple of 16, from shared memory.
__device__ inline void store_bytes(void* global, const void* shared, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
               "r"(shared_address(shared)), "r"(bytes)
               : "memory");
}
__device__ inline void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until the shared memory of all stores but the last kPending groups may be written again.
template <int kPending = 0>
__device__ inline void wait_stores_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Sets the number of registers of each thread of the warpgroup: more from the block's pool, or
// fewer.
template <int kRegisters>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Named barriers have ids 1 to 15; `threads` counts waiting threads and threads that only arrive.
__device__ inline void named_barrier_wait(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ inline void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// Waits, and returns true if any thread passes true.
__device__ __forceinline__ bool named_barrier_any(int id, int threads, bool value) {
  int any;
  asm volatile(
      "{\n.reg .pred p, q;\nsetp.ne.s32 p, %1, 0;\nbar.red.or.pred q, %2, %3, p;\nselp.s32 %0, 1, "
      "0, q;\n}"
      : "=r"(any)
      : "r"(static_cast<int>(value)), "r"(id), "r"(threads)
      : "memory");
  return any != 0;
}

// Converts the two fp8 values in the lower half of `two` to f16.
template <Type kFrom>
__device__ __forceinline__ uint32_t widen(uint32_t two) {
  if constexpr (kFrom == f8e4m3) {
    return widen_e4m3(two);
  } else {
    uint32_t wide;
    asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(wide) : "h"(static_cast<uint16_t>(two)));
    return wide;
  }
}
// Converts the two fp8 values in the upper half of `four` to f16, without a shift.
template <Type kFrom>
__device__ __forceinline__ uint32_t widen_upper(uint32_t four) {
  uint32_t wide;
  if constexpr (kFrom == f8e4m3) {
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.rn.f16x2.e4m3x2 %0, high;\n}"
        : "=r"(wide)
        : "r"(four));
  } else {
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.rn.f16x2.e5m2x2 %0, high;\n}"
        : "=r"(wide)
        : "r"(four));
  }
  return wide;
}

}  // namespace fovea::kernels::cuda
