// SPDX-License-Identifier: Apache-2.0
// The convolution: neighbouring channels in the lanes, one tap after another over a tile of tokens.
#include <hwy/contrib/math/math-inl.h>
#include <string.h>

#include "kernels/cpu/simd/convert.h"
#include "kernels/cpu/simd/linear_attention.h"

namespace fovea::kernels::cpu::FOVEA_ISA {
namespace {

constexpr int32_t kTile = 32;  // tokens whose sums stay in the first-level cache

// A vector of channels of one request.
struct Channels {
  const CausalConvParams& params;
  const StateSpan& span;
  int32_t first;
  int32_t count;  // at most kLanes

  float* state() const {
    return params.state + span.slot * params.state_slot_stride +
           static_cast<int64_t>(first) * (params.width - 1);
  }
};

HWY_INLINE F32 load_channels(const float* from, int32_t count) {
  return count == kLanes ? load(from) : load_first(from, count);
}

// Loads from[lane * stride], the layout of weights and states.
HWY_INLINE F32 gather(const float* from, int32_t stride, int32_t count) {
  alignas(64) float lanes[kLanes] = {};
  for (int32_t lane = 0; lane < count; ++lane) lanes[lane] = from[lane * stride];
  return load(lanes);
}

// Returns the input `back` tokens before span.begin: from the state, or 0 before the request's
// first token.
HWY_INLINE F32 earlier_input(const Channels& channels, int64_t back) {
  if (channels.span.from_zero) return hn::Zero(kF32);
  const int32_t kept = channels.params.width - 1;
  return gather(channels.state() + (kept - back), kept, channels.count);
}

HWY_INLINE F32 silu(F32 x) {
  // e^88 is finite, and 1 / (1 + e^88) is too small to change any sum.
  const F32 negative = hn::Min(hn::Neg(x), hn::Set(kF32, 88.0f));
  return hn::Div(x, hn::Add(hn::Set(kF32, 1.0f), hn::Exp(kF32, negative)));
}

// Convolves tokens [begin, begin + tokens) of the batch.
void convolve_tile(const Channels& channels, int64_t begin, int32_t tokens) {
  const CausalConvParams& params = channels.params;
  const int32_t count = channels.count;
  F32 sums[kTile];
  const F32 bias =
      params.bias ? load_channels(params.bias + channels.first, count) : hn::Zero(kF32);
  for (int32_t t = 0; t < tokens; ++t) sums[t] = bias;
  for (int32_t tap = 0; tap < params.width; ++tap) {
    const float* weights = params.weight + static_cast<int64_t>(channels.first) * params.width;
    const F32 weight = gather(weights + tap, params.width, count);
    for (int32_t t = 0; t < tokens; ++t) {
      const int64_t token = begin + t - (params.width - 1) + tap;
      const F32 x = token < channels.span.begin
                        ? earlier_input(channels, channels.span.begin - token)
                        : load_channels(params.x + token * params.dim + channels.first, count);
      sums[t] = hn::MulAdd(weight, x, sums[t]);
    }
  }
  for (int32_t t = 0; t < tokens; ++t) {
    float* y = params.y + (begin + t) * params.y_token_stride + channels.first;
    const F32 result = params.plain ? sums[t] : silu(sums[t]);
    if (count == kLanes) {
      store(result, y);
    } else {
      store_first(result, y, count);
    }
  }
}

// Stores the last width - 1 inputs before `end` in a slot, oldest first. The slot may be the
// request's own, as entries only move to the front.
void keep_last_inputs(const Channels& channels, int64_t end, int64_t slot) {
  const CausalConvParams& params = channels.params;
  const int64_t kept = params.width - 1;
  const int64_t tokens = end - channels.span.begin;
  for (int32_t lane = 0; lane < channels.count; ++lane) {
    const float* state = channels.state() + lane * kept;
    float* to =
        channels.state() + (slot - channels.span.slot) * params.state_slot_stride + lane * kept;
    for (int64_t i = 0; i < kept; ++i) {
      const int64_t token = end - kept + i;
      if (token >= channels.span.begin) {
        to[i] = params.x[token * params.dim + channels.first + lane];
      } else {
        to[i] = channels.span.from_zero ? 0.0f : state[i + tokens];
      }
    }
  }
}

}  // namespace

void convolve_channels(const CausalConvParams& params, const StateSpan& span, int32_t begin,
                       int32_t end) {
  const auto channels_from = [&](int32_t first) {
    return Channels{params, span, first, end - first < kLanes ? end - first : kLanes};
  };
  // All channels of a few tokens come before the next tokens, so that each page is visited once.
  for (int64_t token = span.begin; token < span.end; token += kTile) {
    const int64_t left = span.end - token;
    const int32_t tokens = left < kTile ? static_cast<int32_t>(left) : kTile;
    for (int32_t first = begin; first < end; first += kLanes) {
      convolve_tile(channels_from(first), token, tokens);
    }
  }
  const auto keep = [&](int64_t token_end, int64_t slot) {
    for (int32_t first = begin; first < end; first += kLanes) {
      keep_last_inputs(channels_from(first), token_end, slot);
    }
  };
  if (params.batch.snapshot_slots) {
    for (int64_t token = span.begin; token < span.end; ++token) {
      const int64_t slot = params.batch.snapshot_slots[token];
      if (slot >= 0) keep(token + 1, slot);
    }
  }
  keep(span.end, span.slot);
}

}  // namespace fovea::kernels::cpu::FOVEA_ISA
