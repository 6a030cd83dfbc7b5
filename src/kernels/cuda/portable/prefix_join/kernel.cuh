// SPDX-License-Identifier: Apache-2.0
// Merges what the passes over shared prefixes found with the pass over the other keys. CTAs (i, any) share the rows of
// request i; a warp takes a row, its lanes the columns; requests in no group are left as they are.
#pragma once

#include "kernels/cuda/common/overlap.cuh"
#include "kernels/cuda/common/prefix_params.h"
#include "kernels/cuda/common/visibility.cuh"

namespace fovea::kernels::cuda {

constexpr int kJoinWarps = 8;

template <Type kOut>
struct PrefixJoinConfig {
  using Params = PrefixJoinParams;
  static constexpr int kBlocksPerSm = 1;
  static constexpr KernelTraits kTraits = {kJoinWarps * 32, 0, 0, 0};

  __device__ static float2 unpack(uint32_t pair) {
    if constexpr (kOut == bf16) {
      return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
    } else {
      float2 values;
      asm("{ .reg .f16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b; }"
          : "=f"(values.x), "=f"(values.y)
          : "r"(pair));
      return values;
    }
  }

  __device__ static void join_row(const Params& params, int request, int64_t token, int head) {
    const int lane = threadIdx.x % 32;
    const int64_t row = token * params.batch.q_heads + head;
    const float own = params.own_lse[row];
    const float sink = params.sinks ? params.sinks[head] : -infinity();
    float lse[kPrefixLevels];
    float most = own;
#pragma unroll
    for (int i = 0; i < kPrefixLevels; ++i) {
      lse[i] = -infinity();
      if (i >= params.levels) continue;
      const int next = i + 1 < params.levels ? params.states[i + 1].first_keys[request]
                                             : params.first_keys[request];
      if (next > params.states[i].first_keys[request]) lse[i] = params.states[i].lse[row];
      most = fmaxf(most, lse[i]);
    }
    // Weights are relative to the largest, be it the sink's; an infinite sink leaves nothing.
    const bool nothing = most == -infinity() || sink == infinity();
    const float base = nothing ? 0.0f : fmaxf(most, sink);
    const float sink_weight = nothing ? 0.0f : __expf(sink - base);
    const float own_weight = __expf(own - base);
    float keys_weight = own_weight;
    float weight[kPrefixLevels];
#pragma unroll
    for (int i = 0; i < kPrefixLevels; ++i) {
      weight[i] = __expf(lse[i] - base);
      keys_weight += weight[i];
    }
    if (params.lse && lane == 0) {
      float sum = 0;  // relative to the keys' largest: the sink may be far above it
      sum += __expf(own - most);
      for (int i = 0; i < kPrefixLevels; ++i) sum += __expf(lse[i] - most);
      params.lse[row] = most == -infinity() ? most : most + logf(sum);
    }
    const float factor = nothing ? 0.0f : 1.0f / (keys_weight + sink_weight);
    // The own pass has divided by its weight and the sink's together.
    const float own_factor = (own_weight + sink_weight) * factor;
    auto* out = static_cast<uint16_t*>(params.out) + token * params.out_token_stride +
                head * params.out_head_stride;
    for (int column = 2 * lane; column < params.head_dim_v; column += 64) {
      auto* pair = reinterpret_cast<uint32_t*>(out + column);
      const float2 value = unpack(*pair);
      float2 sum = {value.x * own_factor, value.y * own_factor};
      for (int i = 0; i < params.levels; ++i) {
        if (weight[i] == 0) continue;  // its out may hold anything
        const float* state = params.states[i].out + row * params.head_dim_v;
        const float2 part = *reinterpret_cast<const float2*>(state + column);
        sum.x += part.x * weight[i] * factor;
        sum.y += part.y * weight[i] * factor;
      }
      *pair = nothing ? 0 : pack<kOut>(sum.x, sum.y);
    }
  }

  __device__ static void run(const Params& params) {
    const int request = blockIdx.x;
    wait_and_allow_next();
    if (params.first_keys[request] == 0) return;
    const RequestView view = request_view(params.batch, request);
    const int heads = params.batch.q_heads;
    const int first = static_cast<int>(blockIdx.y * kJoinWarps + threadIdx.x / 32);
    for (int row = first; row < view.q_len * heads; row += static_cast<int>(gridDim.y) * kJoinWarps) {
      join_row(params, request, view.q_begin + row / heads, row % heads);
    }
  }
};

template <Type kOut>
using Config = PrefixJoinConfig<kOut>;

}  // namespace fovea::kernels::cuda
