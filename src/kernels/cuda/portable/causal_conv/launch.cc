// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/portable/causal_conv/launch.h"

#include <algorithm>

#include "core/check.h"
#include "core/rounding.h"
#include "kernels/cuda/family.h"

namespace fovea::kernels::cuda {
namespace {

constexpr int32_t kThreads = 128;    // channels of a block
constexpr int64_t kMaxGrid = 65535;  // y of a grid
// Tokens of a block, unless the grid would be too large: fewer if requests have few.
constexpr int64_t kTile = 16, kFewTokens = 8;

}  // namespace

std::vector<gpu::KernelVariant> causal_conv_variants(int32_t width, int sm) {
  check_argument(width >= 1 && width <= kMaxConvWidth, "no kernel has {} taps, at most {}", width,
                 kMaxConvWidth);
  const char* taps = width <= 4 ? "4" : "8";
  const Family& conv = family("portable/causal_conv");
  return {make_variant(conv, {taps, "outputs"}, sm), make_variant(conv, {taps, "windows"}, sm),
          make_variant(conv, {taps, "requests"}, sm)};
}

CausalConv::CausalConv(std::span<const gpu::KernelVariant> variants, gpu::KernelStore& store)
    : outputs_(variants[0], store), windows_(variants[1], store), requests_(variants[2], store) {}

void CausalConv::run(CausalConvKernelParams params, int32_t requests, int32_t tokens, bool are_few,
                     gpu::Launcher launcher) const {
  const auto blocks = static_cast<uint32_t>(ceil_div(params.dim, kThreads));
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
