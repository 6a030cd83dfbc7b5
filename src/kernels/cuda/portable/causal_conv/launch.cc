// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/portable/causal_conv/launch.h"

#include <algorithm>

#include "core/check.h"
#include "core/rounding.h"
#include "kernels/cuda/family.h"

namespace fovea::kernels::cuda {
namespace {

constexpr int32_t kFewTaps = 4;      // threads of these kernels may take four channels
constexpr int64_t kMaxGrid = 65535;  // y of a grid
// Tokens of a block, unless the grid would be too large: fewer if requests have few. With the three
// before them, 29 are groups of four.
constexpr int64_t kTile = 29, kFewTokens = 8;
// With fewer blocks a multiprocessor, threads of one channel each finish earlier.
constexpr int64_t kMinBlocks = 4;

// True if weights, windows and rows of x, y and drafts are vectors of four channels.
bool has_vectors(const CausalConvKernelParams& params) {
  const auto is_aligned = [](const void* address) {
    return reinterpret_cast<uintptr_t>(address) % 16 == 0;
  };
  return params.width == kFewTaps && params.dim % 4 == 0 && params.y_token_stride % 4 == 0 &&
         params.state_slot_stride % 4 == 0 && is_aligned(params.x) && is_aligned(params.y) &&
         is_aligned(params.weight) && is_aligned(params.bias) && is_aligned(params.state) &&
         is_aligned(params.kept.rows);
}

}  // namespace

std::vector<gpu::KernelVariant> causal_conv_variants(int32_t width, int sm) {
  check_argument(width >= 1 && width <= kMaxConvWidth, "no kernel has {} taps, at most {}", width,
                 kMaxConvWidth);
  const char* taps = width <= kFewTaps ? "4" : "8";
  const Family& conv = family("portable/causal_conv");
  return {make_variant(conv, {taps, "outputs"}, sm), make_variant(conv, {taps, "windows"}, sm),
          make_variant(conv, {taps, "requests"}, sm)};
}

CausalConv::CausalConv(std::span<const gpu::KernelVariant> variants, int32_t multiprocessors,
                       gpu::KernelStore& store)
    : multiprocessors_(multiprocessors),
      outputs_(variants[0], store),
      windows_(variants[1], store),
      requests_(variants[2], store) {}

void CausalConv::run(CausalConvKernelParams params, int32_t requests, int32_t tokens, bool are_few,
                     gpu::Launcher launcher) const {
  const int64_t few_blocks = ceil_div<int64_t>(params.dim, 4 * outputs_.row_tile()) * requests;
  params.vectors = has_vectors(params) && (!are_few || few_blocks >= kMinBlocks * multiprocessors_);
  params.next_waits = params.next_waits && are_few && params.vectors;
  const int32_t channels = outputs_.row_tile() * (params.vectors ? 4 : 1);
  const auto blocks = static_cast<uint32_t>(ceil_div(params.dim, channels));
  if (are_few) {
    requests_.launch({blocks, static_cast<uint32_t>(requests)}, params, launcher, kOverlapped);
    return;
  }
  const int64_t tile = tokens <= kFewTokens * requests ? kFewTokens : kTile;
  params.tile = static_cast<int32_t>(std::max(tile, ceil_div<int64_t>(tokens, kMaxGrid)));
  outputs_.launch({blocks, static_cast<uint32_t>(ceil_div(tokens, params.tile))}, params, launcher,
                  kOverlapped);
  windows_.launch({blocks, static_cast<uint32_t>(requests)}, params, launcher, kOverlapped);
}

}  // namespace fovea::kernels::cuda
