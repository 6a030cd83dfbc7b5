// SPDX-License-Identifier: Apache-2.0
// The layers and batches that linear_cuda_bench times.
#pragma once

#include <cstdint>

#include "fovea/attention_spec.h"

namespace fovea::bench {

struct Shape {
  const char* name;
  AttentionKind kind;
  LinearSpec linear;
  DType states = DType::f32;
};

inline constexpr LinearSpec kDelta{
    .key_heads = 16, .value_heads = 32, .key_dim = 128, .value_dim = 128};
inline constexpr LinearSpec kMamba2{
    .key_heads = 8, .value_heads = 128, .key_dim = 128, .value_dim = 64};
inline constexpr LinearSpec kKda{
    .key_heads = 32, .value_heads = 32, .key_dim = 128, .value_dim = 128};
inline constexpr LinearSpec kLarge{
    .key_heads = 64, .value_heads = 64, .key_dim = 128, .value_dim = 128};
inline constexpr LinearSpec kMamba1{
    .key_heads = 1, .value_heads = 8192, .key_dim = 16, .value_dim = 1};

// A convolution alone.
constexpr LinearSpec channels(int32_t count) {
  return {.value_heads = count / 128, .value_dim = 128, .conv_width = 4};
}

constexpr LinearSpec convolved(LinearSpec linear, int32_t width = 4) {
  linear.conv_width = width;
  return linear;
}

inline constexpr Shape kShapes[] = {
    {"delta 16/32", AttentionKind::gated_delta_net, convolved(kDelta)},
    {"delta 16/32 alone", AttentionKind::gated_delta_net, kDelta},
    {"delta 16/32 bf16 states", AttentionKind::gated_delta_net, convolved(kDelta), DType::bf16},
    {"delta 16/32 alone bf16 states", AttentionKind::gated_delta_net, kDelta, DType::bf16},
    {"mamba2 128", AttentionKind::mamba2, convolved(kMamba2)},
    {"mamba2 128 alone", AttentionKind::mamba2, kMamba2},
    {"mamba2 128 alone bf16 states", AttentionKind::mamba2, kMamba2, DType::bf16},
    {"kda 32", AttentionKind::kda, convolved(kKda)},
    {"kda 32 alone", AttentionKind::kda, kKda},
    {"kda 32 alone bf16 states", AttentionKind::kda, kKda, DType::bf16},
    {"lightning 64", AttentionKind::lightning, convolved(kLarge, 1)},
    {"lightning 64 alone", AttentionKind::lightning, kLarge},
    {"mamba1 8192", AttentionKind::mamba1, convolved(kMamba1)},
    {"mamba1 8192 alone", AttentionKind::mamba1, kMamba1},
    {"conv 8192", AttentionKind::short_conv, channels(8192)},
    {"conv 10240", AttentionKind::short_conv, channels(10240)},
    {"conv 12288", AttentionKind::short_conv, channels(12288)},
};

struct Load {
  const char* name;
  int32_t requests, tokens;  // tokens of each request
  bool snapshots = false;    // after each token
  int32_t max_drafts = 0;    // that slots keep
  int32_t drafts = 0;        // among the tokens
  int32_t accepted = 0;      // slots hold max_drafts drafts
};

inline constexpr Load kLoads[] = {
    {"decode 1", 1, 1},
    {"decode 8", 8, 1},
    {"decode 32", 32, 1},
    {"decode 128", 128, 1},
    {"decode 256", 256, 1},
    {"verify 4 of 32", 32, 4, true},
    {"kept 4 of 1", 1, 4, false, 4, 4, 4},
    {"kept 4 of 8", 8, 4, false, 4, 4, 4},
    {"kept 4 of 32", 32, 4, false, 4, 4, 4},
    {"kept 4 of 128", 128, 4, false, 4, 4, 4},
    {"kept 4 of 256", 256, 4, false, 4, 4, 4},
    {"kept 4 of 32, two accepted", 32, 4, false, 4, 4, 2},
    {"kept 4 of 32, none accepted", 32, 4, false, 4, 4},
    {"kept step of 32", 32, 5, false, 4, 4, 4},
    {"kept decode of 32", 32, 1, false, 4},
    {"kept decode of 256", 256, 1, false, 4},
    {"kept decode of 32, two accepted", 32, 1, false, 4, 0, 2},
    {"prompt 1x1k", 1, 1024},
    {"prompt 1x4k", 1, 4096},
    {"prompt 1x8k", 1, 8192},
    {"prompt 8x2k", 8, 2048},
    {"prompt 1x16k", 1, 16384},
    {"prompt 4x8k", 4, 8192},
};

}  // namespace fovea::bench
