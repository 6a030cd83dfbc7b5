// SPDX-License-Identifier: Apache-2.0
// Accumulators to out and lse, or to a partial result for the merge.
#pragma once

#include "kernels/cuda/portable/attention/mainloop.cuh"

namespace fovea::kernels::cuda {

// What the sum over values is to be multiplied by: a scale that all tokens share, or the unit in which
// their own were folded into the weights.
template <class Config>
__device__ float value_scale(const KeyParams& keys, int kv_head) {
  if (!Config::kConvert || !keys.v_scale) return 1.0f;
  return keys.scale_slot_stride ? 1.0f / Config::kScaleUnit
                                : keys.v_scale[kv_head * keys.scale_head_stride];
}

template <class Config>
__device__ void store_tile(const AttentionParams& params, const Tile& tile,
                           const Accumulator<Config>& sum) {
  const int lane = threadIdx.x % 32;
  auto* out = static_cast<uint16_t*>(params.out);
  const float scale = value_scale<Config>(params.keys, tile.item.kv_head);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    // Each lane of a row added its own columns.
    float total = sum.sum[half];
    total += __shfl_xor_sync(~0u, total, 1);
    total += __shfl_xor_sync(~0u, total, 2);
    const int row = threadIdx.x / 32 * 16 + lane / 4 + half * 8;
    if (row >= tile.rows) continue;
    const bool empty = total == 0;
    float factor = empty ? 0.0f : scale / total;
    const float lse = empty ? -infinity() : (sum.most[half] + log2f(total)) * kLn2;
    const int64_t token = tile.view.q_begin + tile.token_of(row);
    const int head = tile.head_of(row);

    const bool partial = tile.item.partial >= 0;
    if (partial || params.f32_out) {
      const int64_t at = partial ? static_cast<int64_t>(tile.item.partial) * kRowTile + row
                                 : token * params.batch.q_heads + head;
      if (lane % 4 == 0) (partial ? params.work.partial_lse : params.lse)[at] = lse;
      float* to = (partial ? params.work.partial_out : static_cast<float*>(params.out)) +
                  at * params.head_dim_v;
#pragma unroll
      for (int d = 0; d < Config::kHeadDimV / 8; ++d) {
        const int column = d * 8 + lane % 4 * 2;
        if (column >= params.head_dim_v) continue;
        to[column] = sum.out[d][2 * half] * factor;
        to[column + 1] = sum.out[d][2 * half + 1] * factor;
      }
      continue;
    }
    if (params.lse && lane % 4 == 0) params.lse[token * params.batch.q_heads + head] = lse;
    if (params.sinks && !empty) factor /= 1.0f + __expf(params.sinks[head] - lse);
    uint16_t* to = out + token * params.out_token_stride + head * params.out_head_stride;
#pragma unroll
    for (int d = 0; d < Config::kHeadDimV / 8; ++d) {
      const int column = d * 8 + lane % 4 * 2;
      if (column >= params.head_dim_v) continue;
      *reinterpret_cast<uint32_t*>(to + column) =
          pack<Config::kQ>(sum.out[d][2 * half] * factor, sum.out[d][2 * half + 1] * factor);
    }
  }
}

}  // namespace fovea::kernels::cuda
