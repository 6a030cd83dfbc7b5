// SPDX-License-Identifier: Apache-2.0
// The causal convolution before a recurrence, with SiLU. A thread takes a channel and slides its
// window over the tokens of a tile. Tiles of one request read the window that the request began
// with, so only a second kernel may replace it, unless no request has more than one token.
#pragma once

#include "kernels/cuda/common/linear_params.h"
#include "kernels/cuda/common/overlap.cuh"

namespace fovea::kernels::cuda {

enum ConvStep { outputs, windows };

template <int kTaps, ConvStep kStep>
struct CausalConvConfig {
  using Params = CausalConvKernelParams;
  static constexpr int kBlocksPerSm = 4;
  static constexpr int kThreads = 128;
  static constexpr KernelTraits kTraits = {kThreads, 0, 0, 0};

  struct Channel {
    const Params& params;
    int32_t channel;

    __device__ float* window(int32_t slot) const {
      return params.state + slot * params.state_slot_stride +
             static_cast<int64_t>(channel) * (params.width - 1);
    }

    // Returns the input of a token of the span, or one of the width - 1 before it.
    __device__ float input(const StateSpan& span, int32_t token) const {
      if (token >= span.begin) {
        return params.x[static_cast<int64_t>(token) * params.dim + channel];
      }
      return span.from_zero ? 0.0f : window(span.slot)[params.width - 1 - (span.begin - token)];
    }

    __device__ void store(const StateSpan& span, int32_t token, float output) const {
      float* const row = params.y + static_cast<int64_t>(token) * params.dim;
      if (span.in_chunks) {
        reinterpret_cast<uint16_t*>(row)[channel] = static_cast<uint16_t>(pack<bf16>(output, 0));
      } else {
        row[channel] = output;
      }
    }
  };

  // The last inputs of a channel; the newest is the last, and the first kTaps - width are 0.
  struct Window {
    float inputs[kTaps];

    // Holds the inputs of the width - 1 tokens before `token`.
    __device__ void fill(const Channel& channel, const StateSpan& span, int32_t token) {
#pragma unroll
      for (int i = 0; i < kTaps; ++i) {
        const int back = kTaps - 1 - i;
        inputs[i] = back < channel.params.width - 1 ? channel.input(span, token - 1 - back) : 0.0f;
      }
    }
    __device__ void add(float input) {
#pragma unroll
      for (int i = 0; i + 1 < kTaps; ++i) inputs[i] = inputs[i + 1];
      inputs[kTaps - 1] = input;
    }
    __device__ void store(const Channel& channel, int32_t slot) const {
      float* const to = channel.window(slot);
      const int kept = channel.params.width - 1;
#pragma unroll
      for (int i = 0; i < kTaps; ++i) {
        const int at = kept - kTaps + i;
        if (at >= 0) to[at] = inputs[i];
      }
    }
  };

  struct Weights {
    float taps[kTaps], bias;

    __device__ explicit Weights(const Channel& channel) {
      const Params& params = channel.params;
      const float* const from =
          params.weight + static_cast<int64_t>(channel.channel) * params.width;
#pragma unroll
      for (int i = 0; i < kTaps; ++i) {
        const int at = params.width - kTaps + i;
        taps[i] = at >= 0 ? from[at] : 0.0f;
      }
      bias = params.bias ? params.bias[channel.channel] : 0.0f;
    }

    __device__ float output(const Window& window) const {
      float sum = bias;
#pragma unroll
      for (int i = 0; i < kTaps; ++i) sum = __fmaf_rn(taps[i], window.inputs[i], sum);
      return sum / (1.0f + expf(-sum));
    }
  };

  __device__ static void convolve(const Channel& channel) {
    const Params& params = channel.params;
    const Weights weights(channel);
    wait_and_allow_next();
    const int32_t first = static_cast<int32_t>(blockIdx.y) * params.tile;
    const int32_t last = min(first + params.tile, *params.plan.token_count);
    StateSpan span = {};
    Window window;
#pragma unroll 1
    for (int32_t token = first; token < last; ++token) {
      if (token == first || token == span.end) {
        span = params.plan.spans[params.plan.token_requests[token]];
        if (span.slot >= 0) window.fill(channel, span, token);
      }
      const int64_t at = static_cast<int64_t>(token) * params.dim + channel.channel;
      if (span.slot < 0) {
        params.y[at] = 0;
        continue;
      }
      window.add(params.x[at]);
      channel.store(span, token, weights.output(window));
      const int32_t snapshot = params.plan.snapshot_slots ? params.plan.snapshot_slots[token] : -1;
      if (snapshot >= 0) window.store(channel, snapshot);
      if (params.keeps_windows) window.store(channel, span.slot);
    }
  }

  __device__ static void keep_window(const Channel& channel) {
    wait_and_allow_next();
    const StateSpan span = channel.params.plan.spans[blockIdx.y];
    if (span.slot < 0 || span.begin >= span.end) return;
    Window window;
    window.fill(channel, span, span.end);
    window.store(channel, span.slot);
  }

  __device__ static void run(const Params& params) {
    const Channel channel = {params, static_cast<int32_t>(blockIdx.x * kThreads + threadIdx.x)};
    if (channel.channel >= params.dim) return;
    if constexpr (kStep == outputs) {
      convolve(channel);
    } else {
      keep_window(channel);
    }
  }
};

template <int kTaps, ConvStep kStep>
using Config = CausalConvConfig<kTaps, kStep>;

}  // namespace fovea::kernels::cuda
