// SPDX-License-Identifier: Apache-2.0
// Replaces src/kernels/cuda/common/cluster.cuh with the same names, in C++.
#pragma once

#include "kernels/cuda/common/hopper.cuh"

namespace fovea::kernels::cuda {

inline void cluster_arrive() { machine_of::machine.cluster_arrive(); }
inline void cluster_arrive_relaxed() { machine_of::machine.cluster_arrive(); }
inline void cluster_wait() { machine_of::machine.cluster_wait(); }

inline int cluster_rank() { return static_cast<int>(machine_of::machine.cluster_rank()); }

// Returns the address in block `rank` that corresponds to `here`.
inline uint32_t address_in_cluster(const void* here, uint32_t rank) {
  return machine_of::machine.map_shared(shared_address(here), rank);
}

inline void arrive_in_cluster(TransactionBarrier& barrier, uint32_t rank) {
  machine_of::machine.arrive(address_in_cluster(&barrier, rank));
}

template <typename T>
void store_at(uint32_t there, const T& value, uint32_t barrier) {
  if (there % sizeof(T) != 0) machine_of::machine.fail("a misaligned store to another block");
  machine_of::machine.copy_bulk(there, sizeof(T), barrier,
                                [=](char* to) { std::memcpy(to, &value, sizeof(T)); });
}
inline void store_in_cluster(int32_t* here, uint32_t rank, int32_t value,
                             TransactionBarrier& barrier) {
  store_at(address_in_cluster(here, rank), value, address_in_cluster(&barrier, rank));
}
inline void store_in_cluster(float* here, uint32_t rank, float2 value,
                             TransactionBarrier& barrier) {
  store_at(address_in_cluster(here, rank), value, address_in_cluster(&barrier, rank));
}
inline void store_in_cluster(float* here, uint32_t rank, const float4& value,
                             TransactionBarrier& barrier) {
  store_at(address_in_cluster(here, rank), value, address_in_cluster(&barrier, rank));
}

inline void store_in_cluster(uint32_t there, const uint32_t (&words)[4], uint32_t barrier) {
  store_at(there, uint4{words[0], words[1], words[2], words[3]}, barrier);
}

inline void copy_in_cluster(void* here, uint32_t rank, int bytes, TransactionBarrier& barrier) {
  machine_of::machine.copy_bulk(address_in_cluster(here, rank), static_cast<uint32_t>(bytes),
                                address_in_cluster(&barrier, rank), [=](char* to) {
                                  std::memcpy(to, here, static_cast<size_t>(bytes));
                                });
}

inline void copy_in_cluster(const void* from, void* there, uint32_t rank, int bytes,
                            TransactionBarrier& barrier) {
  machine_of::machine.copy_bulk(address_in_cluster(there, rank), static_cast<uint32_t>(bytes),
                                address_in_cluster(&barrier, rank), [=](char* to) {
                                  std::memcpy(to, from, static_cast<size_t>(bytes));
                                });
}

inline void load_box_to_pair(void* shared, const TensorMap& map, TransactionBarrier& barrier,
                             int c0, int c1, int c2, int c3) {
  for (const uint32_t rank : {0u, 1u}) {
    load_box_at(address_in_cluster(shared, rank), map, address_in_cluster(&barrier, rank),
                {c0, c1, c2, c3});
  }
}

}  // namespace fovea::kernels::cuda
