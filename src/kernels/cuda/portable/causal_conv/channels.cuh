// SPDX-License-Identifier: Apache-2.0
// The channels of a thread: their weights, their windows and rows in memory.
#pragma once

#include "kernels/cuda/common/request_tokens.cuh"

namespace fovea::kernels::cuda {

constexpr int kConvThreads = 64;

template <int kChannels>
struct ChannelValues {
  float at[kChannels];

  __device__ void clear() {
#pragma unroll
    for (int j = 0; j < kChannels; ++j) at[j] = 0;
  }
};

// Loads a span by one instruction, which the compiler does not do by itself.
__device__ inline StateSpan load_span(const StateSpan* from) {
  const int4 words = *reinterpret_cast<const int4*>(from);
  return {words.x, words.y, words.z, static_cast<int16_t>(words.w),
          static_cast<int16_t>(words.w >> 16)};
}

// The channels of a thread.
template <int kChannels>
struct ConvChannels {
  using Params = CausalConvKernelParams;
  using Values = ChannelValues<kChannels>;

  const Params& params;
  int32_t channel;  // the first

  __device__ explicit ConvChannels(const Params& params)
      : params(params),
        channel(static_cast<int32_t>(blockIdx.x * kConvThreads + threadIdx.x) * kChannels) {}

  // True if outputs of replayed drafts are read.
  __device__ bool replay() const {
    return channel < params.replayed_end && channel + kChannels > params.replayed_begin;
  }

  // Copies between registers and a row of all channels.
  __device__ Values load(const float* row) const {
    const float* const from = row + channel;
    if constexpr (kChannels == 4) {
      const float4 four = *reinterpret_cast<const float4*>(from);
      return {four.x, four.y, four.z, four.w};
    } else {
      return {*from};
    }
  }
  __device__ void store(float* row, const Values& values) const {
    float* const to = row + channel;
    if constexpr (kChannels == 4) {
      const auto& at = values.at;
      *reinterpret_cast<float4*>(to) = float4{at[0], at[1], at[2], at[3]};
    } else {
      *to = values.at[0];
    }
  }
  // Stores bf16 into the first half of a row.
  __device__ void store_rounded(float* row, const Values& values) const {
    uint16_t* const to = reinterpret_cast<uint16_t*>(row) + channel;
    const auto& at = values.at;
    if constexpr (kChannels == 4) {
      *reinterpret_cast<uint2*>(to) = uint2{pack<bf16>(at[0], at[1]), pack<bf16>(at[2], at[3])};
    } else {
      *to = static_cast<uint16_t>(pack<bf16>(at[0], 0));
    }
  }

  __device__ const float* x(int32_t token) const {
    return params.x + static_cast<int64_t>(token) * params.dim;
  }
  __device__ float* y(int32_t token) const { return params.y + token * params.y_token_stride; }
  __device__ RequestTokens tokens(int32_t request) const {
    const LinearPlan& plan = params.plan;
    return {load_span(plan.spans + request), plan.drafts ? plan.drafts[request] : DraftSpan{}};
  }
  __device__ float* window(int32_t slot) const {
    return params.state + slot * params.state_slot_stride +
           static_cast<int64_t>(channel) * (params.width - 1);
  }
};

// Loads `count` values of each channel, which follow each other, into the last of `taps`; the
// others become 0.
template <int kTaps>
__device__ void load_taps(ChannelValues<1> (&taps)[kTaps], const float* from, int count) {
#pragma unroll
  for (int i = 0; i < kTaps; ++i) {
    const int at = count - kTaps + i;
    taps[i].at[0] = at >= 0 ? from[at] : 0.0f;
  }
}
template <int kTaps>
__device__ void store_taps(const ChannelValues<1> (&taps)[kTaps], float* to, int count) {
#pragma unroll
  for (int i = 0; i < kTaps; ++i) {
    const int at = count - kTaps + i;
    if (at >= 0) to[at] = taps[i].at[0];
  }
}

// Four channels are as many vectors as values each, whose number is known.
template <int kCount, int kTaps>
__device__ void load_vectors(ChannelValues<4> (&taps)[kTaps], const float* from) {
  float values[4 * kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float4 four = reinterpret_cast<const float4*>(from)[i];
    values[4 * i] = four.x, values[4 * i + 1] = four.y;
    values[4 * i + 2] = four.z, values[4 * i + 3] = four.w;
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) taps[kTaps - kCount + i].at[j] = values[j * kCount + i];
  }
}
template <int kCount, int kTaps>
__device__ void store_vectors(const ChannelValues<4> (&taps)[kTaps], float* to) {
  float values[4 * kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) values[j * kCount + i] = taps[kTaps - kCount + i].at[j];
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    reinterpret_cast<float4*>(to)[i] =
        float4{values[4 * i], values[4 * i + 1], values[4 * i + 2], values[4 * i + 3]};
  }
}

// The last inputs of channels; the newest is the last, and the first kTaps - width are 0.
template <int kTaps, int kChannels>
struct ConvWindow {
  using Channels = ConvChannels<kChannels>;
  using Values = ChannelValues<kChannels>;

  Values inputs[kTaps];

  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < kTaps; ++i) inputs[i].clear();
  }
  __device__ void load(const Channels& channels, int32_t slot) {
    if constexpr (kChannels == 4) {
      load_vectors<kTaps - 1>(inputs, channels.window(slot));
    } else {
      load_taps(inputs, channels.window(slot), channels.params.width - 1);
    }
  }

  __device__ void add(const Values& input) {
#pragma unroll
    for (int i = 0; i + 1 < kTaps; ++i) inputs[i] = inputs[i + 1];
    inputs[kTaps - 1] = input;
  }

  __device__ void store(const Channels& channels, int32_t slot) const {
    if constexpr (kChannels == 4) {
      store_vectors<kTaps - 1>(inputs, channels.window(slot));
    } else {
      store_taps(inputs, channels.window(slot), channels.params.width - 1);
    }
  }
};

template <int kTaps, int kChannels>
struct ConvWeights {
  using Channels = ConvChannels<kChannels>;
  using Values = ChannelValues<kChannels>;

  Values taps[kTaps], bias;

  __device__ explicit ConvWeights(const Channels& channels) {
    const CausalConvKernelParams& params = channels.params;
    const float* const from = params.weight + static_cast<int64_t>(channels.channel) * params.width;
    if constexpr (kChannels == 4) {
      load_vectors<kTaps>(taps, from);
    } else {
      load_taps(taps, from, params.width);
    }
    bias.clear();
    if (params.bias) bias = channels.load(params.bias);
  }

  __device__ Values output(const ConvWindow<kTaps, kChannels>& window, bool plain) const {
    Values sums = bias;
#pragma unroll
    for (int j = 0; j < kChannels; ++j) {
      float& sum = sums.at[j];
#pragma unroll
      for (int i = 0; i < kTaps; ++i) {
        sum = __fmaf_rn(taps[i].at[j], window.inputs[i].at[j], sum);
      }
      if (!plain) sum = sum / (1.0f + expf(-sum));
    }
    return sums;
  }
};

}  // namespace fovea::kernels::cuda
