// SPDX-License-Identifier: Apache-2.0
// The products of a consumer warpgroup, and the operands that they read.
#pragma once

#include "kernels/cuda/common/wgmma.cuh"
#include "kernels/cuda/sm90/common/softmax.cuh"

namespace fovea::kernels::cuda {

// Keys of the smallest product of a row tile's first key tile.
template <class Config>
constexpr int kGrain = Config::kKeys % 32 == 0 ? 32 : Config::kKeys;

template <class Config>
__device__ __forceinline__ void load_queries(typename Config::SharedMemory& shared, int consumer,
                                             int stage, Accumulators<Config>& acc) {
  if constexpr (Config::kMath != Config::kQ) narrow_queries<Config>(shared, consumer, stage);
  if constexpr (Config::kQueryRegisterSteps > 0) {
#pragma unroll
    for (int step = 0; step < Config::kQueryRegisterSteps; ++step) {
      load_query_step<Config>(shared, consumer, stage, step,
                              reinterpret_cast<uint32_t(&)[4]>(acc.queries[4 * step]));
    }
    if (Config::kQueryRegisters && !Config::kQueryRing && !Config::kPasses &&
        threadIdx.x % 32 == 0) {
      shared.q_empty[stage][consumer].arrive();
    }
  }
}

// Waits for keys. Rows that threads have copied become visible to the tensor cores by a fence of
// their reader.
template <class Config>
__device__ __forceinline__ void await_keys(TransactionBarrier& full, uint32_t phase) {
  full.wait(phase);
  if constexpr (Config::kRows && !Config::kWiden) fence_async_proxy();
}

// Starts scores = q * K^T.
template <class Config>
__device__ __forceinline__ void start_scores(typename Config::SharedMemory& shared, int consumer,
                                             int q_stage, int stage, Accumulators<Config>& acc) {
  const uint64_t k = rows_descriptor(shared_address(shared.k[stage]));
  // Opaque: otherwise the compiler keeps the descriptors of all steps in registers.
  const uint64_t q =
      rows_descriptor(opaque(shared_address(Config::queries(shared, q_stage, consumer))));
#pragma unroll
  for (int step = 0; step < Config::kHeadDim * Config::kBytes / 32; ++step) {
    const uint64_t k_step = moved(k, step / 4 * sizeof(shared.k[0][0]) + step % 4 * 32);
    if (step < Config::kQueryRegisterSteps) {
      Product<Config::kKeys>::template run<Config::kMath, false>(acc.scores, &acc.queries[4 * step],
                                                                 k_step, step > 0);
    } else {
      const uint64_t q_step = moved(
          q, step / 4 * sizeof(typename Config::Queries) / Config::kDimBlocks + step % 4 * 32);
      Product<Config::kKeys>::template run<Config::kMath, false>(acc.scores, q_step, k_step,
                                                                 step > 0);
    }
  }
}

// Starts out (+)= weights * V over keys [kFirst, kEnd) of the tile.
template <class Config, int kFirst, int kEnd>
__device__ __forceinline__ void start_values(const typename Config::SharedMemory& shared, int stage,
                                             bool add, Accumulators<Config>& acc) {
  if constexpr (Config::kNarrow) {
    const uint64_t v = rows_descriptor(shared_address(shared.v[stage]));
#pragma unroll
    for (int key = kFirst; key < kEnd; key += 32) {
      Product<Config::kHeadDimV>::template run<Config::kMath, false>(
          acc.out, &acc.weights[key / 8],
          moved(v, key / kSwizzledBytes * sizeof(shared.v[0][0]) + key % kSwizzledBytes),
          add || key > kFirst);
    }
  } else {
    const uint64_t v = columns_descriptor(shared_address(shared.v[stage]), sizeof(shared.v[0][0]));
#pragma unroll
    for (int key = kFirst; key < kEnd; key += 16) {
      Product<Config::kHeadDimV>::template run<Config::kMath, true>(
          acc.out, &acc.weights[key / 4], moved(v, key * 128), add || key > kFirst);
    }
  }
}

template <class Config, int kFrom = 0>
__device__ __forceinline__ void start_first_values(const typename Config::SharedMemory& shared,
                                                   int stage, int columns,
                                                   Accumulators<Config>& acc) {
  if constexpr (kFrom < Config::kKeys) {
    if (kFrom == 0 || uniform(columns > kFrom)) {
      start_values<Config, kFrom, kFrom + kGrain<Config>>(shared, stage, kFrom > 0, acc);
      start_first_values<Config, kFrom + kGrain<Config>>(shared, stage, columns, acc);
    }
  }
}

// Zeroes values of keys that the request does not own or that have left its window: they may be
// NaN, and 0 * NaN is NaN. Each warpgroup clears rows [from, to) of the key tile for itself;
// several may write the same zeros at once.
template <class Config>
__device__ __forceinline__ void clear_unowned_values(typename Config::SharedMemory& shared,
                                                     int stage, int from, int to, int consumer) {
  if (Config::kRows || Config::kNarrow || from >= to) return;  // they have been zeroed
  constexpr int kChunks = kSwizzledColumns / 8;
  for (int i = threadIdx.x % kWarpgroupThreads; i < (to - from) * kChunks; i += kWarpgroupThreads) {
#pragma unroll
    for (int c = 0; c < Config::kDimVBlocks; ++c) {
      *reinterpret_cast<uint4*>(&shared.v[stage][c][from + i / kChunks][i % kChunks * 8]) = {};
    }
  }
  fence_async_proxy();
  meet_consumer(consumer);
}

// Clears unowned values of a row tile's first key tile, which has its last keys; `used` of its keys
// are multiplied.
template <class Config>
__device__ __forceinline__ void clear_last_keys(typename Config::SharedMemory& shared, int stage,
                                                const RowTile& tile, int used, int consumer) {
  if (!opens<Config>(tile)) return;
  const int first = tile.slot->work.kv_len - last_block<Config>(tile) * Config::kKeys;
  clear_unowned_values<Config>(shared, stage, max(first, 0), used, consumer);
}

// Clears values before the keys of the request in a row tile's last key tile.
template <class Config>
__device__ __forceinline__ void clear_first_keys(typename Config::SharedMemory& shared, int stage,
                                                 const RowTile& tile, int consumer) {
  if (!closes<Config>(tile)) return;
  const int end = tile.slot->work.key_begin - tile.block_begin * Config::kKeys;
  clear_unowned_values<Config>(shared, stage, 0, min(end, Config::kKeys), consumer);
}

}  // namespace fovea::kernels::cuda
