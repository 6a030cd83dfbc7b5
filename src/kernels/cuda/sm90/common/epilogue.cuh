// SPDX-License-Identifier: Apache-2.0
// From accumulators to out and lse.
#pragma once

#include "kernels/cuda/sm90/common/parts.cuh"
#include "kernels/cuda/sm90/common/products.cuh"
#include "kernels/cuda/sm90/common/staged_rows.cuh"

namespace fovea::kernels::cuda {

// Finds the factor of each of the thread's rows that turns sums into means, sink included, and
// stores lse.
template <class Config>
__device__ __forceinline__ void finish_rows(const PrefillParams& params, const WorkTile& work,
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
    if constexpr (Config::kFp8) factor[half] *= value_unit<Config>(attention, work, acc);
    if (!attention.lse && !attention.sinks) continue;
    const float lse = empty ? -infinity() : (acc.base[half] + log2f(total)) * kLn2;
    const int row = thread_row(half);
    const int head = row_head(params, work, row);
    const int token = row_token(params, work, consumer, row);
    if (token >= work.q_len) continue;
    if (attention.lse && threadIdx.x % 4 == 0) {
      attention
          .lse[static_cast<int64_t>(work.q_begin + token) * attention.lse_token_stride + head] =
          lse;
    }
    if (attention.sinks && !empty) factor[half] /= 1.0f + __expf(attention.sinks[head] - lse);
  }
}

// Does the same for a row tile or a part of one.
template <class Config>
__device__ __forceinline__ void finish_result(const PrefillParams& params, const TileSlot& slot,
                                              int consumer, const Accumulators<Config>& acc,
                                              float (&factor)[2]) {
  if constexpr (Config::kParts) {
    if (!is_final(params, slot)) return finish_part<Config>(params, slot, consumer, acc, factor);
  }
  finish_rows<Config>(params, slot.work, consumer, acc, factor);
}

// Stages the consumer's rows in shared memory. The copy engine stores them from there, under the
// next row tile's products.
template <class Config>
__device__ __forceinline__ void store_staged(const PrefillParams& params,
                                             typename Config::SharedMemory& shared,
                                             const WorkTile& work, int consumer,
                                             const float (&factor)[2],
                                             const Accumulators<Config>& acc) {
  const bool first_thread = threadIdx.x % kWarpgroupThreads == 0;
  const int lane = threadIdx.x % 32;
  const int row = threadIdx.x % kWarpgroupThreads / 32 * 16 + lane % 16;
  const int token = row_token(params, work, consumer, 0);
  const bool whole = token + (kGroupRows >> params.heads_shift) <= work.q_len;
#pragma unroll
  for (int block = 0; block < Config::kHeadDimV / kSwizzledColumns; ++block) {
    auto& staged = shared.out[consumer][block % Config::kOutBlocks];
    if (block % Config::kOutBlocks == 0) {
      if (first_thread) wait_stores_read();
      meet_consumer(consumer);
    }
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      uint32_t piece[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = 4 * (block * 8 + j + i / 2) + 2 * (i % 2);
        piece[i] = pack<Config::kOut>(acc.out[at] * factor[i % 2], acc.out[at + 1] * factor[i % 2]);
      }
      store_matrices(&staged[row][((j + lane / 16) ^ row % 8) * 8], piece);
    }
    if ((block + 1) % Config::kOutBlocks != 0 && block + 1 < Config::kHeadDimV / kSwizzledColumns)
      continue;
    fence_async_proxy();
    meet_consumer(consumer);
#pragma unroll
    for (int b = block / Config::kOutBlocks * Config::kOutBlocks; b <= block; ++b) {
      if (!whole) {
        copy_staged<Config>(params, shared, work, consumer, b);
      } else if (first_thread) {
        store_box(params.out, shared.out[consumer][b % Config::kOutBlocks], b * kSwizzledColumns,
                  work.q_head, work.q_begin + token);
      }
    }
    if (first_thread) commit_stores();
  }
}

// Stages columns [16 * step, 16 * step + 16) of the consumer's rows.
template <class Config>
__device__ __forceinline__ void stage_columns(typename Config::SharedMemory& shared, int consumer,
                                              int step, const float (&factor)[2],
                                              const Accumulators<Config>& acc) {
  static_assert(Config::kOutBlocks * kSwizzledColumns == Config::kHeadDimV);
  const int lane = threadIdx.x % 32;
  const int row = threadIdx.x % kWarpgroupThreads / 32 * 16 + lane % 16;
  const int j = step % 4 * 2;
  uint32_t piece[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int at = 4 * (step / 4 * 8 + j + i / 2) + 2 * (i % 2);
    piece[i] = pack<Config::kOut>(acc.out[at] * factor[i % 2], acc.out[at + 1] * factor[i % 2]);
  }
  store_matrices(&Config::out(shared, consumer)[step / 4][row][((j + lane / 16) ^ row % 8) * 8],
                 piece);
}

// Stores rows from registers. Four neighbouring lanes hold 2 columns each of every 8; after an
// exchange each holds 8 columns of every 32, which it stores as 16 bytes.
template <class Config>
__device__ __forceinline__ void store_direct(const PrefillParams& params, const WorkTile& work,
                                             int consumer, const float (&factor)[2],
                                             const Accumulators<Config>& acc) {
  const AttentionParams& attention = params.attention;
  const int lane = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = thread_row(half);
    const int head = row_head(params, work, row);
    const int token = row_token(params, work, consumer, row);
    const bool valid = token < work.q_len;
    uint16_t* to = static_cast<uint16_t*>(attention.out) +
                   (work.q_begin + token) * attention.out_token_stride +
                   head * attention.out_head_stride;
#pragma unroll
    for (int j = 0; j < Config::kHeadDimV / 8; j += 4) {
      uint32_t piece[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = 4 * (j + i) + 2 * half;
        piece[i] = pack<Config::kOut>(acc.out[at] * factor[half], acc.out[at + 1] * factor[half]);
      }
      // Transposes 4 lanes x 4 pieces in two exchanges.
      const bool odd = lane & 1;
      const uint32_t give0 = odd ? piece[0] : piece[1];
      const uint32_t give1 = odd ? piece[2] : piece[3];
      const uint32_t get0 = __shfl_xor_sync(~0u, give0, 1);
      const uint32_t get1 = __shfl_xor_sync(~0u, give1, 1);
      const uint32_t even_low = odd ? get0 : piece[0];
      const uint32_t even_high = odd ? piece[1] : get0;
      const uint32_t far_low = odd ? get1 : piece[2];
      const uint32_t far_high = odd ? piece[3] : get1;
      const bool upper = lane & 2;
      const uint32_t send0 = upper ? even_low : far_low;
      const uint32_t send1 = upper ? even_high : far_high;
      const uint32_t got0 = __shfl_xor_sync(~0u, send0, 2);
      const uint32_t got1 = __shfl_xor_sync(~0u, send1, 2);
      const uint4 words =
          upper ? uint4{got0, got1, far_low, far_high} : uint4{even_low, even_high, got0, got1};
      const int column = (j + lane) * 8;
      if (valid && column < attention.head_dim_v) *reinterpret_cast<uint4*>(to + column) = words;
    }
  }
}

template <class Config>
__device__ __forceinline__ void store_rows(const PrefillParams& params,
                                           typename Config::SharedMemory& shared,
                                           const WorkTile& work, int consumer,
                                           const float (&factor)[2],
                                           const Accumulators<Config>& acc) {
  if constexpr (Config::kStageOut) {
    store_staged<Config>(params, shared, work, consumer, factor, acc);
  } else {
    store_direct<Config>(params, work, consumer, factor, acc);
  }
}

}  // namespace fovea::kernels::cuda
