// SPDX-License-Identifier: Apache-2.0
// Attention of single rows in fp64, in plain loops, and the distance of a result from it. A block
// computes a row: the warps score the keys, then come the weights, then the threads sum the
// columns.
#pragma once

#include "kernels/cuda/common/measure_params.h"
#include "kernels/cuda/common/ptx.cuh"

namespace fovea::kernels::cuda {

constexpr int kRowWarps = 8;
constexpr int kRowThreads = kRowWarps * 32;

template <Type kType>
__device__ inline float element(const void* data, int64_t index) {
  if constexpr (kType == f32) {
    return static_cast<const float*>(data)[index];
  } else if constexpr (kType == f8e4m3) {
    const uint32_t bits = static_cast<const uint8_t*>(data)[index];
    const float magnitude = __uint_as_float((bits & 0x7f) << 20) * 0x1p120f;
    return bits & 0x80 ? -magnitude : magnitude;
  } else {
    return to_float<kType>(static_cast<const uint16_t*>(data)[index]);
  }
}

// Returns column d of the cached row at `at`. A row of MLA in fp8 has 512 e4m3 values, 4 f32 scales
// and 64 bf16 values.
template <Type kCache>
__device__ inline float cached(const void* data, int64_t at, int d, bool mla_fp8_rows) {
  if constexpr (kCache == f8e4m3) {
    if (mla_fp8_rows) {
      const auto* row = static_cast<const char*>(data) + at;
      if (d >= 512) return element<bf16>(row + 528, d - 512);
      return element<f8e4m3>(row, d) * element<f32>(row + 512, d / 128);
    }
  }
  return element<kCache>(data, at + d);
}

template <Type kQuery, Type kCache, Type kOut>
struct Config {
  using Params = AttentionRowsParams;
  static constexpr int kBlocksPerSm = 1;
  static constexpr KernelTraits kTraits = {kRowThreads, 0, 0, 0};

  template <typename Combine>
  __device__ static double over_block(double value, double neutral, Combine combine) {
    __shared__ double parts[kRowWarps];
    for (int step = 16; step > 0; step /= 2) {
      value = combine(value, __shfl_xor_sync(0xffffffffu, value, step));
    }
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
    __syncthreads();
    value = neutral;
    for (int warp = 0; warp < kRowWarps; ++warp) value = combine(value, parts[warp]);
    __syncthreads();
    return value;
  }

  __device__ static void run(const Params& params) {
    const SampledRow row = params.rows[blockIdx.x];
    const int32_t* slots = params.slots + row.request * params.slots_stride;
    double* scores = params.scores + blockIdx.x * params.scores_stride;
    const int kv_head = row.q_head / (params.q_heads / params.kv_heads);
    const int64_t q_row = static_cast<int64_t>(row.token) * params.q_heads + row.q_head;
    const int lane = threadIdx.x % 32;

    for (int key = row.key_begin + threadIdx.x / 32; key < row.key_end; key += kRowWarps) {
      const int64_t slot = slots[key];
      const int64_t at = slot / params.page_size * params.k_page_stride +
                         slot % params.page_size * params.k_token_stride +
                         kv_head * params.k_head_stride;
      double dot = 0;
      for (int d = lane; d < params.head_dim; d += 32) {
        dot += static_cast<double>(element<kQuery>(params.q, q_row * params.head_dim + d)) *
               cached<kCache>(params.k, at, d, params.mla_fp8_rows);
      }
      for (int step = 16; step > 0; step /= 2) dot += __shfl_xor_sync(0xffffffffu, dot, step);
      if (params.k_scale) {
        dot *= params.k_scale[slot * params.scale_slot_stride + kv_head * params.scale_head_stride];
      }
      dot *= params.scale;
      if (params.logit_cap > 0) dot = params.logit_cap * tanh(dot / params.logit_cap);
      if (params.alibi_slopes) dot -= params.alibi_slopes[row.q_head] * (row.key_end - 1 - key);
      if (lane == 0) scores[key] = dot;
    }
    __syncthreads();
    double most = -1e300;
    for (int key = row.key_begin + threadIdx.x; key < row.key_end; key += kRowThreads) {
      most = fmax(most, scores[key]);
    }
    most = over_block(most, -1e300, [](double a, double b) { return fmax(a, b); });
    double sum = 0;
    for (int key = row.key_begin + threadIdx.x; key < row.key_end; key += kRowThreads) {
      const double weight = exp(scores[key] - most);
      sum += weight;
      const int64_t slot = slots[key];
      scores[key] = params.v_scale ? weight * params.v_scale[slot * params.scale_slot_stride +
                                                             kv_head * params.scale_head_stride]
                                   : weight;
    }
    const auto add = [](double a, double b) { return a + b; };
    sum = over_block(sum, 0, add);
    if (params.sinks) sum += exp(params.sinks[row.q_head] - most);

    double squared_error = 0;
    double squared_norm = 0;
    for (int d = threadIdx.x; d < params.head_dim_v; d += kRowThreads) {
      double expected = 0;
      for (int key = row.key_begin; key < row.key_end; ++key) {
        const int64_t slot = slots[key];
        const int64_t at = slot / params.page_size * params.v_page_stride +
                           slot % params.page_size * params.v_token_stride +
                           kv_head * params.v_head_stride;
        expected += scores[key] * cached<kCache>(params.v, at, d, params.mla_fp8_rows);
      }
      if (sum > 0) expected /= sum;
      const double difference = expected - element<kOut>(params.out, q_row * params.head_dim_v + d);
      squared_error += difference * difference;
      squared_norm += expected * expected;
    }
    squared_error = over_block(squared_error, 0, add);
    squared_norm = over_block(squared_norm, 0, add);
    if (threadIdx.x == 0) params.errors[blockIdx.x] = {squared_error, squared_norm};
  }
};

}  // namespace fovea::kernels::cuda
