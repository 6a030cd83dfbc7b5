// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/sm90/skinny_experts/launch.h"

#include <algorithm>
#include <cstdint>

#include "core/check.h"
#include "core/rounding.h"
#include "gpu/architectures.h"
#include "kernels/cuda/family.h"

namespace fovea::kernels::cuda {
namespace {

size_t index_of(ExpertProduct product, bool is_kn) {
  return static_cast<size_t>(product) * 2 + (is_kn ? 1 : 0);
}

// Returns the number of weight columns, or of pairs of a gate and an up times two.
int32_t columns_of(ExpertProduct product, const SkinnyExpertsParams& params) {
  return product == ExpertProduct::gated ? 2 * params.n : params.n;
}

}  // namespace

ExpertProducts::ExpertProducts(int sm, gpu::KernelStore& store) {
  if (sm != gpu::kHopper) return;
  const Family& products = family("sm90/skinny_experts");
  for (const ExpertProduct product : {ExpertProduct::gated, ExpertProduct::combined}) {
    for (const bool is_kn : {false, true}) {
      kernels_.emplace_back(make_variant(products,
                                         {product == ExpertProduct::gated ? "gated" : "combined",
                                          is_kn ? "true" : "false"},
                                         sm),
                            store);
    }
  }
}

// Rows of x and of weights are copied 16 bytes at a time, and offsets in a matrix have 32 bits.
bool ExpertProducts::serves(const SkinnyExpertsParams& params, bool is_kn) const {
  constexpr int32_t kElements = 8;
  constexpr int64_t kMaxElements = INT32_MAX;
  const int32_t depth = is_kn ? 16 : 32;
  const int64_t columns = int64_t{params.n} * params.column_step + params.up_column;
  const int64_t lines = is_kn ? int64_t{params.k} : columns;
  return !kernels_.empty() && params.rows >= 1 && params.rows <= kMaxSkinnyRows &&
         params.top_k >= 1 && int64_t{params.rows} * params.top_k <= kMaxSkinnyChoices &&
         params.experts >= 1 && params.experts <= kMaxSkinnyExperts && params.n >= kElements &&
         params.n % kElements == 0 && params.k >= depth && params.k % depth == 0 &&
         reinterpret_cast<uintptr_t>(params.x) % 16 == 0 && params.x_stride % kElements == 0 &&
         params.weight_stride % kElements == 0 && params.out_stride % 2 == 0 &&
         lines * params.weight_stride <= kMaxElements;
}

// A tile of the combined product has all experts, so there are few tiles.
int32_t ExpertProducts::splits_of(ExpertProduct product, bool is_kn) {
  if (product == ExpertProduct::gated) return 1;
  return is_kn ? 4 : 2;
}

void ExpertProducts::run(ExpertProduct product, SkinnyExpertsParams params, bool is_kn,
                         Stream stream) const {
  params.splits = splits_of(product, is_kn);
  run_divided(product, params, is_kn, stream);
}

void ExpertProducts::run_divided(ExpertProduct product, const SkinnyExpertsParams& params,
                                 bool is_kn, Stream stream) const {
  check_argument(params.splits >= 1 && params.splits <= kMaxSkinnySplits,
                 "splits is {}, must be in [1, {}]", params.splits, kMaxSkinnySplits);
  const Kernel& kernel = kernels_[index_of(product, is_kn)];
  const int32_t tiles = ceil_div(columns_of(product, params), kernel.key_tile());
  const int32_t slots =
      product == ExpertProduct::gated ? std::min(params.rows * params.top_k, params.experts) : 1;
  kernel.launch({static_cast<uint32_t>(tiles * params.splits), static_cast<uint32_t>(slots)},
                params, stream,
                {.overlapped = true, .cluster = static_cast<uint32_t>(params.splits)});
}

}  // namespace fovea::kernels::cuda
