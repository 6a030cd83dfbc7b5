// SPDX-License-Identifier: Apache-2.0
// Accumulators to out and lse.
#pragma once

#include "kernels/cuda/sm90/prefill_rows/mainloop.cuh"

namespace fovea::kernels::cuda {

// The factor of each of the thread's rows that turns sums into means, sink included; writes lse.
template <class Config>
__device__ __forceinline__ void finish_rows(const PrefillParams& params, const RowTile& tile,
                                            int consumer, const Accumulators<Config>& acc,
                                            float (&factor)[2]) {
  const AttentionParams& attention = params.attention;
  const TileSlot& slot = *tile.slot;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float total = acc.sum[half];
    total += __shfl_xor_sync(~0u, total, 1);
    total += __shfl_xor_sync(~0u, total, 2);
    const bool empty = total == 0;
    factor[half] = empty ? 0.0f : 1.0f / total;
    if constexpr (Config::kFp8) {
      const KeyParams& keys = attention.keys;
      factor[half] *= keys.scale_slot_stride ? acc.v_unit
                                             : shared_scale(keys, keys.v_scale, slot.kv_head);
    }
    const float lse =
        empty ? -infinity()
              : (acc.most[half] * score_factor<Config>(params, tile, half) + log2f(total) -
                 Config::kBias) *
                    kLn2;
    const int row = thread_row(half);
    const int head = row_head(params, slot, row);
    const int token = row_token(params, slot, consumer, row);
    const bool valid = token < slot.q_len;
    if (!valid) continue;
    if (attention.lse && threadIdx.x % 4 == 0) {
      attention.lse[static_cast<int64_t>(slot.q_begin + token) * attention.batch.q_heads + head] =
          lse;
    }
    if (attention.sinks && !empty) factor[half] /= 1.0f + __expf(attention.sinks[head] - lse);
  }
}

// Four neighbouring lanes hold 2 columns each of every 8: after the exchange each holds 8 columns of
// every 32, which it stores as 16 bytes.
template <class Config>
__device__ __forceinline__ void store_rows(const PrefillParams& params, const TileSlot& slot,
                                           int consumer, const float (&factor)[2],
                                           const Accumulators<Config>& acc) {
  const AttentionParams& attention = params.attention;
  const int lane = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = thread_row(half);
    const int head = row_head(params, slot, row);
    const int token = row_token(params, slot, consumer, row);
    const bool valid = token < slot.q_len;
    uint16_t* to = static_cast<uint16_t*>(attention.out) +
                   (slot.q_begin + token) * attention.out_token_stride +
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
      const uint4 words = upper ? uint4{got0, got1, far_low, far_high}
                                : uint4{even_low, even_high, got0, got1};
      const int column = (j + lane) * 8;
      if (valid && column < attention.head_dim_v) *reinterpret_cast<uint4*>(to + column) = words;
    }
  }
}

}  // namespace fovea::kernels::cuda
