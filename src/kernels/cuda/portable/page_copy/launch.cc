// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/portable/page_copy/launch.h"

#include <algorithm>

#include "core/rounding.h"
#include "kernels/cuda/family.h"

namespace fovea::kernels::cuda {
namespace {

Kernel load(const char* op, int sm, gpu::KernelStore& store) {
  return Kernel(make_variant(family("portable/page_copy"), {op}, sm), store);
}

GridSize grid_of(const Kernel& kernel, const MovedTokens& moved, int arrays) {
  constexpr int64_t kMaxBlocks = 1024;
  const int64_t rows = int64_t{moved.tokens} * moved.heads;
  const int64_t blocks = std::min(ceil_div(rows, int64_t{kernel.row_tile()}), kMaxBlocks);
  return {static_cast<uint32_t>(blocks), static_cast<uint32_t>(arrays)};
}

}  // namespace

PageCopy::PageCopy(int sm, gpu::KernelStore& store)
    : rows_(load("rows", sm, store)), values_(load("values", sm, store)) {}

void PageCopy::copy(const PageCopyParams& params, int arrays, gpu::Launcher launcher) const {
  rows_.launch(grid_of(rows_, params.moved, arrays), params, launcher, kOverlapped);
}

void PageCopy::convert(const PageConvertParams& params, int arrays, gpu::Launcher launcher) const {
  values_.launch(grid_of(values_, params.moved, arrays), params, launcher, kOverlapped);
}

}  // namespace fovea::kernels::cuda
