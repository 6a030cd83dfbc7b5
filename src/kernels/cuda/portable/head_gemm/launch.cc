// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>

#include "core/check.h"
#include "core/rounding.h"
#include "kernels/cuda/attention_kernel.h"
#include "kernels/cuda/family.h"
#include "kernels/cuda/head_gemm.h"

namespace fovea::kernels::cuda {
namespace {

// Limits of the tiles, in multiples of a row's products with 512 x 128 weights: up to kMinProducts
// the smallest tile, for as many blocks as possible; then the smallest tile that holds all tokens,
// so that weights are read once; from kManyProducts on the large tile (chosen on H100, 2026-11-27).
constexpr std::array<int32_t, 3> kFewRows = {16, 32, 64};
constexpr int64_t kRowProducts = int64_t{512} * 128;
constexpr int64_t kMinProducts = 1024 * kRowProducts;
constexpr int64_t kManyProducts = 8192 * kRowProducts;
// Blocks that fill any GPU several times over.
constexpr int32_t kManyCtas = 1024;

}  // namespace

std::vector<gpu::KernelVariant> HeadGemm::variants(const HeadGemmSetup& setup) {
  const auto type = variant_type(setup.dtype);
  check_argument(type && !is_fp8(setup.dtype), "dtype is {}, accepted: bf16, f16",
                 dtype_name(setup.dtype));
  const std::string is_kn = setup.order == WeightOrder::kn ? "true" : "false";
  const Family& gemm = family("portable/head_gemm");
  std::vector<gpu::KernelVariant> needed;
  for (const int32_t rows : kFewRows) {
    needed.push_back(make_variant(gemm, {std::to_string(rows), is_kn, "false", *type}, setup.sm));
  }
  for (const char* several : {"false", "true"}) {
    needed.push_back(make_variant(gemm, {"128", is_kn, several, *type}, setup.sm));
  }
  if (setup.hopper) {
    const std::vector<gpu::KernelVariant> hopper = HopperHeadGemm::variants(setup);
    needed.insert(needed.end(), hopper.begin(), hopper.end());
  }
  return needed;
}

HeadGemm::HeadGemm(const HeadGemmSetup& setup, gpu::KernelStore& store) {
  const std::vector<gpu::KernelVariant> needed = variants(setup);
  for (size_t i = 0; i < few_.size(); ++i) few_[i] = Kernel(needed[i], store);
  many_ = Kernel(needed[few_.size()], store);
  several_tiles_ = Kernel(needed[few_.size() + 1], store);
  if (setup.hopper) hopper_.emplace(setup, store);
}

void HeadGemm::run(HeadGemmParams params, gpu::Launcher launcher) const {
  if (hopper_ && hopper_->serves(params)) return hopper_->run(params, launcher);
  const int64_t products = int64_t{params.tokens} * params.heads * params.n * params.k;
  // Small tiles do not check whether all of their rows are skipped.
  const int64_t max_products = params.skip ? kManyProducts / 4 : kManyProducts;
  const bool few = params.tokens <= kFewRows[1] || products <= max_products;
  size_t fitting = 0;
  while (products > kMinProducts && fitting + 1 < kFewRows.size() &&
         params.tokens > kFewRows[fitting]) {
    ++fitting;
  }
  const Kernel& shape = few ? few_[fitting] : many_;
  params.row_tiles = ceil_div(params.tokens, shape.row_tile());
  params.groups = params.heads * ceil_div(params.n, shape.key_tile());
  const bool several = !few && params.skip && params.row_tiles * params.groups > kManyCtas;
  if (several) params.groups = std::min(params.groups, ceil_div(kManyCtas, params.row_tiles));
  const GridSize grid{static_cast<uint32_t>(params.row_tiles * params.groups)};
  // Blocks that start early crowd onto the multiprocessors that become idle first. Waiting for
  // weights does not suffer from that, but products do, so the large tile is not launched early.
  if (few) return shape.launch(grid, params, launcher, kOverlapped);
  (several ? several_tiles_ : many_).launch(grid, params, launcher);
}

}  // namespace fovea::kernels::cuda
