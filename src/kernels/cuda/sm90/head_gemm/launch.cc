// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "core/rounding.h"
#include "kernels/cuda/attention_kernel.h"
#include "kernels/cuda/family.h"
#include "kernels/cuda/head_gemm.h"

namespace fovea::kernels::cuda {
namespace {

constexpr uint32_t kBoxColumns = 64;  // columns of every box
constexpr uint32_t kBoxDepth = 64;    // rows of a box of weights [k, n]

uint64_t bytes(int64_t elements) { return static_cast<uint64_t>(elements) * sizeof(uint16_t); }

}  // namespace

std::vector<gpu::KernelVariant> HopperHeadGemm::variants(const HeadGemmSetup& setup) {
  const Family& gemm = family("sm90/head_gemm");
  const std::string is_kn = setup.order == WeightOrder::kn ? "true" : "false";
  const std::string type = *variant_type(setup.dtype);
  return {make_variant(gemm, {"64", is_kn, type}, setup.sm),
          make_variant(gemm, {"128", is_kn, type}, setup.sm)};
}

HopperHeadGemm::HopperHeadGemm(const HeadGemmSetup& setup, gpu::KernelStore& store)
    : order_(setup.order), multiprocessors_(setup.multiprocessors) {
  const std::vector<gpu::KernelVariant> needed = variants(setup);
  small_ = Kernel(needed[0], store);
  large_ = Kernel(needed[1], store);
}

bool HopperHeadGemm::serves(const HeadGemmParams& params) const {
  // With fewer products only the weights matter, and many small blocks load them sooner.
  const int32_t few_tokens = order_ == WeightOrder::kn ? 32 : 16;
  constexpr int64_t kFewProducts = int64_t{2048} * 512 * 128;
  const int64_t products = int64_t{params.tokens} * params.heads * params.n * params.k;
  return params.tokens > few_tokens && products > kFewProducts &&
         (!params.skip || ceil_div(params.tokens, large_.row_tile()) <= kMaxSkippingTiles);
}

void HopperHeadGemm::run(const HeadGemmParams& given, gpu::Launcher launcher) const {
  // Small tiles if the next launch then finds idle multiprocessors, to load its weights.
  const int32_t small_tiles = ceil_div(given.tokens, small_.row_tile()) * given.heads *
                              ceil_div(given.n, small_.key_tile());
  const bool small = given.tokens <= small_.row_tile() || 2 * small_tiles <= multiprocessors_;
  const Kernel& kernel = small ? small_ : large_;
  const auto size = [](int32_t value) { return static_cast<uint64_t>(value); };
  HopperHeadGemmParams params{};
  maps_.x.encode({.data = given.x,
                  .rank = 3,
                  .sizes = {size(given.k), size(given.heads), size(given.tokens)},
                  .strides = {bytes(given.x_head_stride), bytes(given.x_token_stride)},
                  .box = {kBoxColumns, 1, static_cast<uint32_t>(kernel.row_tile())}},
                 &params.x);
  const bool is_kn = order_ == WeightOrder::kn;
  maps_.weight.encode(
      {.data = given.weight,
       .rank = 3,
       .sizes = {size(is_kn ? given.n : given.k), size(is_kn ? given.k : given.n),
                 size(given.heads)},
       .strides = {bytes(given.weight_row_stride), bytes(given.weight_head_stride)},
       .box = {kBoxColumns, is_kn ? kBoxDepth : static_cast<uint32_t>(kernel.key_tile()), 1}},
      &params.weight);
  params.out = given.out;
  params.out_token_stride = given.out_token_stride;
  params.out_head_stride = given.out_head_stride;
  params.live_tokens = given.live_tokens;
  params.skip = given.skip;
  params.tokens = given.tokens;
  params.n = given.n;
  params.k = given.k;
  params.row_tiles = ceil_div(given.tokens, kernel.row_tile());
  params.column_tiles = ceil_div(given.n, kernel.key_tile());
  params.groups = given.heads * params.column_tiles;
  const int32_t blocks = std::min(params.row_tiles * params.groups, multiprocessors_);
  kernel.launch({static_cast<uint32_t>(blocks)}, params, launcher, kOverlapped);
}

}  // namespace fovea::kernels::cuda
