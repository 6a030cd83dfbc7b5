// SPDX-License-Identifier: Apache-2.0
// Rows that consumers stage in shared memory, on their way to out.
#pragma once

#include "kernels/cuda/sm90/common/rows.cuh"
#include "kernels/cuda/sm90/common/slots.cuh"

namespace fovea::kernels::cuda {

// Copies a consumer's staged columns to out, 16 bytes at a time, if its rows end within the box,
// which would write past them. kThreads threads take part.
template <class Config, int kThreads = kWarpgroupThreads>
__device__ __forceinline__ void copy_staged(const PrefillParams& params,
                                            const typename Config::SharedMemory& shared,
                                            const WorkTile& work, int consumer, int block) {
  constexpr int kChunks = kSwizzledColumns / 8;
  const AttentionParams& attention = params.attention;
  const auto& staged = Config::out(shared, consumer)[block % Config::kOutBlocks];
  const int chunk = threadIdx.x % kChunks;
  const int column = block * kSwizzledColumns + chunk * 8;
#pragma unroll 1
  for (int row = threadIdx.x % kThreads / kChunks; row < kGroupRows; row += kThreads / kChunks) {
    const int token = row_token(params, work, consumer, row);
    if (token >= work.q_len || column >= attention.head_dim_v) return;
    uint16_t* to = static_cast<uint16_t*>(attention.out) +
                   (work.q_begin + token) * attention.out_token_stride +
                   row_head(params, work, row) * attention.out_head_stride;
    *reinterpret_cast<uint4*>(to + column) =
        *reinterpret_cast<const uint4*>(&staged[row][(chunk ^ row % 8) * 8]);
  }
}

// Stores a row tile that consumers stage. A warp calls it.
template <class Config>
__device__ __forceinline__ void store_tile(const PrefillParams& params,
                                           typename Config::SharedMemory& shared,
                                           const WorkTile& work, uint32_t phase) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int consumer = 0; consumer < Config::kConsumers; ++consumer) {
    shared.stores.full[consumer].wait(phase);
    const int token = row_token(params, work, consumer, 0);
    if (token + (kGroupRows >> params.heads_shift) > work.q_len) {
      for (int b = 0; b < Config::kOutBlocks; ++b)
        copy_staged<Config, 32>(params, shared, work, consumer, b);
    } else if (lane == 0) {
#pragma unroll
      for (int b = 0; b < Config::kOutBlocks; ++b) {
        store_box(params.out, Config::out(shared, consumer)[b], b * kSwizzledColumns, work.q_head,
                  work.q_begin + token);
      }
      commit_stores();
    }
    __syncwarp();
  }
  if (lane == 0) wait_stores_read();
  if constexpr (Config::kPasses) {
    __syncwarp();
    if (lane < 4 * Config::kConsumers) shared.q_empty[0][lane / 4].arrive();
  } else if (lane == 0) {
#pragma unroll
    for (int consumer = 0; consumer < Config::kConsumers; ++consumer)
      shared.stores.empty[consumer].arrive();
  }
}

}  // namespace fovea::kernels::cuda
