// SPDX-License-Identifier: Apache-2.0
// Accumulators to out and lse.
#pragma once

#include "kernels/cuda/sm90/prefill/mainloop.cuh"

namespace fovea::kernels::cuda {

// The factor of each of the thread's rows that turns sums into means, sink included; writes lse.
template <class Config>
__device__ __forceinline__ void finish_rows(const PrefillParams& params, const TileSlot& slot,
                                            int consumer, const Accumulators<Config>& acc,
                                            float (&factor)[2]) {
  const AttentionParams& attention = params.attention;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float total = acc.sum[half];
    total += __shfl_xor_sync(~0u, total, 1);
    total += __shfl_xor_sync(~0u, total, 2);
    const bool empty = total == 0;
    factor[half] = empty ? 0.0f : __fdividef(1.0f, total);
    if (!attention.lse && !attention.sinks) continue;
    const float lse =
        empty ? -infinity() : (acc.base[half] + log2f(total)) * kLn2;
    const int row = thread_row(half);
    const int head = row_head(params, slot, row);
    const int token = row_token(params, slot, consumer, row);
    if (token >= slot.q_len) continue;
    if (attention.lse && threadIdx.x % 4 == 0) {
      attention.lse[static_cast<int64_t>(slot.q_begin + token) * attention.batch.q_heads + head] =
          lse;
    }
    if (attention.sinks && !empty) factor[half] /= 1.0f + __expf(attention.sinks[head] - lse);
  }
}

// Rows [first, end) of the staged columns to memory, 16 bytes at a time: of a consumer whose rows end within
// it, and which a box would write past.
template <class Config>
__device__ __forceinline__ void copy_staged(const PrefillParams& params,
                                            const typename Config::SharedMemory& shared,
                                            const TileSlot& slot, int consumer, int block) {
  constexpr int kChunks = kSwizzledColumns / 8;
  const AttentionParams& attention = params.attention;
  const auto& staged = shared.out[consumer][block % Config::kOutBlocks];
  const int chunk = threadIdx.x % kChunks;
  const int column = block * kSwizzledColumns + chunk * 8;
#pragma unroll 1
  for (int row = threadIdx.x % kWarpgroupThreads / kChunks; row < kGroupRows;
       row += kWarpgroupThreads / kChunks) {
    const int token = row_token(params, slot, consumer, row);
    if (token >= slot.q_len || column >= attention.head_dim_v) return;
    uint16_t* to = static_cast<uint16_t*>(attention.out) +
                   (slot.q_begin + token) * attention.out_token_stride +
                   row_head(params, slot, row) * attention.out_head_stride;
    *reinterpret_cast<uint4*>(to + column) =
        *reinterpret_cast<const uint4*>(&staged[row][(chunk ^ row % 8) * 8]);
  }
}

// The consumer's rows go to shared memory, and from there by the copy engine, under the next row tile's
// products.
template <class Config>
__device__ __forceinline__ void store_rows(const PrefillParams& params,
                                           typename Config::SharedMemory& shared,
                                           const TileSlot& slot, int consumer,
                                           const float (&factor)[2],
                                           const Accumulators<Config>& acc) {
  const bool first_thread = threadIdx.x % kWarpgroupThreads == 0;
  const int lane = threadIdx.x % 32;
  const int row = threadIdx.x % kWarpgroupThreads / 32 * 16 + lane % 16;
  const int token = row_token(params, slot, consumer, 0);
  const bool whole = token + (kGroupRows >> params.heads_shift) <= slot.q_len;
#pragma unroll
  for (int block = 0; block < Config::kDimVBlocks; ++block) {
    auto& staged = shared.out[consumer][block % Config::kOutBlocks];
    if (block % Config::kOutBlocks == 0) {
      if (first_thread) wait_stores_read();
      named_barrier_wait(8 + consumer, kWarpgroupThreads);
    }
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      uint32_t piece[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = 4 * (block * 8 + j + i / 2) + 2 * (i % 2);
        piece[i] = pack<Config::kQ>(acc.out[at] * factor[i % 2], acc.out[at + 1] * factor[i % 2]);
      }
      store_matrices(&staged[row][((j + lane / 16) ^ row % 8) * 8], piece);
    }
    if ((block + 1) % Config::kOutBlocks != 0 && block + 1 < Config::kDimVBlocks) continue;
    fence_async_proxy();
    named_barrier_wait(8 + consumer, kWarpgroupThreads);
#pragma unroll
    for (int b = block / Config::kOutBlocks * Config::kOutBlocks; b <= block; ++b) {
      if (!whole) {
        copy_staged<Config>(params, shared, slot, consumer, b);
      } else if (first_thread) {
        store_box(params.out, shared.out[consumer][b % Config::kOutBlocks], b * kSwizzledColumns,
                  slot.q_head, slot.q_begin + token);
      }
    }
    if (first_thread) commit_stores();
  }
}

}  // namespace fovea::kernels::cuda
