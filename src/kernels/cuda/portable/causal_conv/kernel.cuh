// SPDX-License-Identifier: Apache-2.0
// The causal convolution before a recurrence, with SiLU. A thread takes a channel and slides its
// window over the tokens of a tile, or over all tokens of a request that has few. Tiles of one
// request read the window that the request began with, so only a second kernel may replace it.
//
// Slots that keep drafts have their raw inputs. They stand between the window and the tokens of the
// batch, as far as they belong to the request now; the thread that replaces the window computes
// their outputs in their place, for the recurrence.
#pragma once

#include "kernels/cuda/common/linear_params.h"
#include "kernels/cuda/common/overlap.cuh"

namespace fovea::kernels::cuda {

enum ConvStep { outputs, windows, requests };

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

    __device__ DraftSpan drafts_of(int32_t request) const {
      return params.plan.drafts ? params.plan.drafts[request] : DraftSpan{};
    }
    // Returns the place of draft number `index`, replayed ones included.
    __device__ float* kept(const StateSpan& span, const DraftSpan& drafts, int32_t index) const {
      return params.kept.rows + span.slot * params.kept.slot_stride +
             int64_t{drafts.row(index)} * params.kept.size + channel;
    }

    // Returns the input of a token of the span, of a replayed one or of one of the width - 1 before
    // these.
    __device__ float input(const StateSpan& span, const DraftSpan& drafts, int32_t token) const {
      if (token >= span.begin) {
        return params.x[static_cast<int64_t>(token) * params.dim + channel];
      }
      const int32_t first = span.begin - drafts.replayed;
      if (token >= first) return *kept(span, drafts, token - first);
      return span.from_zero ? 0.0f : window(span.slot)[params.width - 1 - (first - token)];
    }

    __device__ void store(const StateSpan& span, int32_t token, float output) const {
      float* const row = params.y + token * params.y_token_stride;
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
    __device__ void fill(const Channel& channel, const StateSpan& span, const DraftSpan& drafts,
                         int32_t token) {
#pragma unroll
      for (int i = 0; i < kTaps; ++i) {
        const int back = kTaps - 1 - i;
        const bool exists = back < channel.params.width - 1;
        inputs[i] = exists ? channel.input(span, drafts, token - 1 - back) : 0.0f;
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

    __device__ float output(const Window& window, bool plain) const {
      float sum = bias;
#pragma unroll
      for (int i = 0; i < kTaps; ++i) sum = __fmaf_rn(taps[i], window.inputs[i], sum);
      return plain ? sum : sum / (1.0f + expf(-sum));
    }
  };

  __device__ static void convolve(const Channel& channel) {
    const Params& params = channel.params;
    const Weights weights(channel);
    wait_and_allow_next();
    const int32_t first = static_cast<int32_t>(blockIdx.y) * params.tile;
    const int32_t last = min(first + params.tile, *params.plan.token_count);
    StateSpan span = {};
    DraftSpan drafts = {};
    Window window;
#pragma unroll 1
    for (int32_t token = first; token < last; ++token) {
      if (token == first || token == span.end) {
        const int32_t request = params.plan.token_requests[token];
        span = params.plan.spans[request];
        drafts = channel.drafts_of(request);
        if (span.slot >= 0) window.fill(channel, span, drafts, token);
      }
      if (span.slot < 0) {
        params.y[token * params.y_token_stride + channel.channel] = 0;
        continue;
      }
      const int64_t at = static_cast<int64_t>(token) * params.dim + channel.channel;
      window.add(params.x[at]);
      channel.store(span, token, weights.output(window, params.plain != 0));
      const int32_t snapshot = params.plan.snapshot_slots ? params.plan.snapshot_slots[token] : -1;
      if (snapshot >= 0) window.store(channel, snapshot);
      const int32_t draft = token - (span.end - drafts.drafts);
      if (draft >= 0) *channel.kept(span, drafts, drafts.replayed + draft) = params.x[at];
    }
  }

  // Does both for a request of a few tokens, whose inputs are on their way together.
  __device__ static void convolve_request(const Channel& channel) {
    constexpr int kTogether = 8;
    const Params& params = channel.params;
    const Weights weights(channel);
    wait_and_allow_next();
    const StateSpan span = params.plan.spans[blockIdx.y];
    const DraftSpan drafts = channel.drafts_of(static_cast<int32_t>(blockIdx.y));
    if (span.slot < 0) return clear_outputs(channel, span);
    const int32_t first = span.begin - drafts.replayed, first_draft = span.end - drafts.drafts;
    Window window;
    if (span.begin < span.end) window.fill(channel, span, drafts, first);
#pragma unroll 1
    for (int32_t begin = first; begin < span.end; begin += kTogether) {
      float inputs[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        if (begin + i < span.end) inputs[i] = channel.input(span, drafts, begin + i);
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int32_t token = begin + i;
        if (token >= span.end) break;
        if (token == first_draft) window.store(channel, span.slot);
        window.add(inputs[i]);
        const float output = weights.output(window, params.plain != 0);
        if (token < span.begin) {
          *channel.kept(span, drafts, token - first) = output;
          continue;
        }
        channel.store(span, token, output);
        const int32_t draft = token - first_draft;
        if (draft >= 0) *channel.kept(span, drafts, drafts.replayed + draft) = inputs[i];
        const int32_t snapshot =
            params.plan.snapshot_slots ? params.plan.snapshot_slots[token] : -1;
        if (snapshot >= 0) window.store(channel, snapshot);
      }
    }
    if (drafts.drafts == 0 && span.begin < span.end) window.store(channel, span.slot);
  }

  __device__ static void clear_outputs(const Channel& channel, const StateSpan& span) {
    for (int32_t token = span.begin; token < span.end; ++token) {
      channel.params.y[token * channel.params.y_token_stride + channel.channel] = 0;
    }
  }

  // Stores the window before the drafts of the span, and computes the outputs of replayed ones.
  __device__ static void keep_window(const Channel& channel, const StateSpan& span,
                                     const DraftSpan& drafts) {
    Window window;
    window.fill(channel, span, drafts, span.end - drafts.drafts);
    if (drafts.replayed > 0) {
      const Weights weights(channel);
      Window sliding;
      sliding.fill(channel, span, drafts, span.begin - drafts.replayed);
#pragma unroll 1
      for (int32_t i = 0; i < drafts.replayed; ++i) {
        float* const at = channel.kept(span, drafts, i);
        sliding.add(*at);
        *at = weights.output(sliding, channel.params.plain != 0);
      }
    }
    window.store(channel, span.slot);
  }

  __device__ static void keep_windows(const Channel& channel) {
    wait_and_allow_next();
    const auto request = static_cast<int32_t>(blockIdx.y);
    const StateSpan span = channel.params.plan.spans[request];
    if (span.slot < 0 || span.begin >= span.end) return;
    keep_window(channel, span, channel.drafts_of(request));
  }

  __device__ static void run(const Params& params) {
    const Channel channel = {params, static_cast<int32_t>(blockIdx.x * kThreads + threadIdx.x)};
    if (channel.channel >= params.dim) return;
    if constexpr (kStep == outputs) {
      convolve(channel);
    } else if constexpr (kStep == requests) {
      convolve_request(channel);
    } else {
      keep_windows(channel);
    }
  }
};

template <int kTaps, ConvStep kStep>
using Config = CausalConvConfig<kTaps, kStep>;

}  // namespace fovea::kernels::cuda
