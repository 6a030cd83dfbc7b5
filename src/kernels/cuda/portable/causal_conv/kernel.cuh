// SPDX-License-Identifier: Apache-2.0
// The causal convolution before a recurrence, with SiLU. A thread takes four channels that follow
// each other, whose weights, windows and inputs are vectors; or one, of any width. It slides their
// windows over the tokens of a tile, or over all tokens of a request that has few. Tiles of one
// request read the window that the request began with, so only a second kernel may replace it.
//
// Slots that keep drafts have their raw inputs. They stand between the window and the tokens of the
// batch, as far as they belong to the request now; the thread that replaces the window computes
// their outputs in their place, for the recurrence.
#pragma once

#include "kernels/cuda/common/linear_params.h"
#include "kernels/cuda/common/overlap.cuh"
#include "kernels/cuda/portable/causal_conv/channels.cuh"

namespace fovea::kernels::cuda {

enum ConvStep { outputs, windows, requests };

// A thread of kernels for up to kTaps taps, with kChannels channels.
template <int kTaps, ConvStep kStep, int kChannels>
struct CausalConvThread {
  using Params = CausalConvKernelParams;
  using Channels = ConvChannels<kChannels>;
  using Values = ChannelValues<kChannels>;
  using Window = ConvWindow<kTaps, kChannels>;
  using Weights = ConvWeights<kTaps, kChannels>;
  // Tokens whose inputs are on their way together.
  static constexpr int kTogether = 4;
  // The next inputs are loaded before the current ones are used, where registers allow it.
  static constexpr bool kAhead = kStep == outputs;

  struct Request : RequestTokens {
    const Channels& channels;

    __device__ Request(const Channels& channels, int32_t request)
        : RequestTokens(channels.tokens(request)), channels(channels) {}
    __device__ float* kept(int32_t token) const { return kept_row(channels.params.kept, token); }

    __device__ void clear_outputs(int32_t begin, int32_t end) const {
      Values zeros;
      zeros.clear();
#pragma unroll 1
      for (int32_t token = begin; token < end; ++token) channels.store(channels.y(token), zeros);
    }

    __device__ int32_t snapshot_of(int32_t token) const {
      const int32_t* const slots = channels.params.plan.snapshot_slots;
      return kStep != windows && slots && token >= span.begin ? slots[token] : -1;
    }

    // Returns how many tokens from `token` on can be computed together. They end where the window
    // may have to be stored, and where the tokens do not follow each other.
    __device__ int32_t count_together(int32_t token, int32_t end) const {
      int32_t count = min(kTogether, end - token);
      if (kStep == requests && token < first_draft()) count = min(count, first_draft() - token);
      if (kStep == windows && token < span.begin) count = min(count, span.begin - token);
      if (kStep == windows || channels.params.plan.snapshot_slots == nullptr) return count;
#pragma unroll 1
      for (int32_t i = 0; i < count; ++i) {
        if (snapshot_of(token + i) >= 0) count = i + 1;
      }
      return count;
    }

    __device__ void load(Values (&inputs)[kTogether], int32_t token, int32_t end) const {
      if (token >= span.begin) {
        const float* row = channels.x(token);
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          if (token + i < end) inputs[i] = channels.load(row);
          row += channels.params.dim;
        }
        return;
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int32_t at = token + i;
        if (at >= end) continue;
        inputs[i] = channels.load(at < span.begin ? kept(at) : channels.x(at));
      }
    }

    // Stores the output of a token, and its input if it is a draft.
    __device__ void store(int32_t token, const Values& output, const Values& input) const {
      float* const row = channels.y(token);
      if (kStep != outputs && token < span.begin) {
        channels.store(kept(token), output);
      } else if (kStep == outputs && span.in_chunks) {
        channels.store_rounded(row, output);
      } else if (kStep != windows) {
        channels.store(row, output);
      }
      if (kStep != windows && token >= first_draft()) {
        channels.store(kept(token), input);
      }
    }

    // Computes kTogether tokens without drafts.
    __device__ void convolve_together(const Weights& weights, const Values (&inputs)[kTogether],
                                      int32_t token, Window& window) const {
      float* row = channels.y(token);
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        window.add(inputs[i]);
        const Values output = weights.output(window, channels.params.plain != 0);
        if (span.in_chunks) {
          channels.store_rounded(row, output);
        } else {
          channels.store(row, output);
        }
        row += channels.params.y_token_stride;
      }
    }

    // True if there is one token and no draft.
    __device__ bool is_decode() const {
      return span.end - span.begin == 1 && drafts.replayed + drafts.drafts == 0;
    }
    __device__ void decode(const Weights& weights) const {
      Window window;
      window.clear();
      if (!span.from_zero) window.load(channels, span.slot);
      window.add(channels.load(channels.x(span.begin)));
      const bool plain = channels.params.plain != 0;
      channels.store(channels.y(span.begin), weights.output(window, plain));
      int32_t later = snapshot_of(span.begin);
#pragma unroll 1
      for (int32_t slot = span.slot; slot >= 0; slot = later, later = -1) {
        window.store(channels, slot);
      }
    }

    // Computes the outputs of tokens from `from` on. Those before fill the window.
    __device__ void convolve(const Weights& weights, int32_t from, int32_t end) const {
      const Params& params = channels.params;
      const int32_t inputs_before = params.width - 1;
      int32_t token = max(begin(), from - inputs_before);
      Values inputs[kTogether];
      load(inputs, token, end);
      Window window;
      window.clear();
      if (token == begin() && !span.from_zero) window.load(channels, span.slot);
      int32_t snapshot = -1;
#pragma unroll 1
      while (true) {
        int32_t slot = kStep != outputs && token == first_draft() ? span.slot : -1;
#pragma unroll 1
        while (slot >= 0 || snapshot >= 0) {
          if (slot >= 0) window.store(channels, slot);
          slot = snapshot;
          snapshot = -1;
        }
        if (token >= end) return;
        const int32_t count = count_together(token, end);
        int32_t following = token + count;
        if (kStep == windows && following >= span.begin) {
          following = max(following, end - inputs_before);
        }
        Values next[kTogether];
        if (kAhead) load(next, following, end);
        const bool is_plain = token >= from && token + count <= first_draft();
        if (kStep == outputs && kChannels > 1 && count == kTogether && is_plain) {
          convolve_together(weights, inputs, token, window);
        } else {
#pragma unroll 1
          for (int32_t at = token; at < token + count; ++at) {
            window.add(inputs[0]);
            if (at >= from) store(at, weights.output(window, params.plain != 0), inputs[0]);
#pragma unroll
            for (int i = 0; i + 1 < kTogether; ++i) inputs[i] = inputs[i + 1];
          }
        }
        snapshot = snapshot_of(token + count - 1);
        token = following;
        if (!kAhead) load(inputs, token, end);
#pragma unroll
        for (int i = 0; kAhead && i < kTogether; ++i) inputs[i] = next[i];
      }
    }
  };

  __device__ static void convolve_tile(const Channels& channels) {
    const Params& params = channels.params;
    const Weights weights(channels);
    wait_and_allow_next();
    int32_t token = static_cast<int32_t>(blockIdx.y) * params.tile;
    const int32_t last = min(token + params.tile, *params.plan.token_count);
#pragma unroll 1
    while (token < last) {
      const Request request(channels, params.plan.token_requests[token]);
      const int32_t end = min(last, request.span.end);
      if (request.span.slot < 0) {
        request.clear_outputs(token, end);
      } else {
        request.convolve(weights, token, end);
      }
      token = end;
    }
  }

  // Computes the outputs of a request of a few tokens and replaces its window, or that alone and
  // the outputs of replayed drafts.
  __device__ static void convolve_request(const Channels& channels) {
    const Weights weights(channels);
    wait_for_previous_kernel();
    if (!channels.params.next_waits) allow_next_kernel();
    const Request request(channels, static_cast<int32_t>(blockIdx.y));
    const StateSpan& span = request.span;
    if (span.slot < 0) {
      if (kStep == requests) request.clear_outputs(span.begin, span.end);
    } else if (kStep == requests && kTaps == 4 && request.is_decode()) {
      request.decode(weights);
    } else if (span.begin < span.end) {
      const int32_t end = kStep == requests ? span.end : request.first_draft();
      const bool replays = request.drafts.replayed > 0 && channels.replay();
      const int32_t behind = kStep == requests ? span.begin : end;
      request.convolve(weights, replays ? request.begin() : behind, end);
    }
  }

  __device__ static void run(const Params& params) {
    const Channels channels(params);
    if (channels.channel >= params.dim) return;
    if constexpr (kStep == outputs) {
      convolve_tile(channels);
    } else {
      convolve_request(channels);
    }
  }
};

template <int kTaps, ConvStep kStep>
struct Config {
  using Params = CausalConvKernelParams;
  static constexpr int kBlocksPerSm = kStep == outputs ? 8 : 12;
  static constexpr KernelTraits kTraits = {kConvThreads, 0, kConvThreads, 0};

  __device__ static void run(const Params& params) {
    if (kTaps == 4 && params.vectors) {
      CausalConvThread<4, kStep, 4>::run(params);
    } else {
      CausalConvThread<kTaps, kStep, 1>::run(params);
    }
  }
};

}  // namespace fovea::kernels::cuda
