// SPDX-License-Identifier: Apache-2.0
// Barriers that all prefill kernels have.
#pragma once

#include "kernels/cuda/sm90/common/slots.cuh"

namespace fovea::kernels::cuda {

// Initializes the barriers of queries, keys and values. So many arrivals fill a stage of keys or
// values.
template <class Config>
__device__ __forceinline__ void init_operand_barriers(typename Config::SharedMemory& shared,
                                                      int key_arrivals, int value_arrivals) {
  for (int i = 0; i < Config::kQueryStages * Config::kConsumers; ++i) {
    shared.q_full[0][i].init(1);
    shared.q_empty[0][i].init(4);
  }
  for (int i = 0; i < Config::kKeyStages; ++i) {
    shared.k_full[i].init(key_arrivals);
    shared.k_empty[i].init(4 * Config::kConsumers * Config::kBlocks);
  }
  for (int i = 0; i < Config::kStages; ++i) {
    shared.v_full[i].init(value_arrivals);
    shared.v_empty[i].init(4 * Config::kConsumers * Config::kBlocks);
  }
}

// Initializes the barriers of masks and of rows that a producer warp stores.
template <class Config>
__device__ __forceinline__ void init_consumer_barriers(typename Config::SharedMemory& shared) {
  if constexpr (Config::kMasked) {
    for (int i = 0; i < Config::kConsumers; ++i) {
      shared.masks.full[i].init(1);
      shared.masks.empty[i].init(4);
    }
  }
  if constexpr (Config::kStoresApart) {
    for (int i = 0; i < Config::kConsumers; ++i) {
      shared.stores.full[i].init(4);
      shared.stores.empty[i].init(1);
    }
  }
}

}  // namespace fovea::kernels::cuda
