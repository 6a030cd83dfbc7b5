// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/portable/page_copy/launch.h"

#include <algorithm>

#include "core/rounding.h"
#include "kernels/cuda/family.h"

namespace fovea::kernels::cuda {

PageCopy::PageCopy(int sm, gpu::KernelStore& store)
    : kernel_(make_variant(family("portable/page_copy"), {"rows"}, sm), store) {}

void PageCopy::run(const PageCopyParams& params, int arrays, gpu::Launcher launcher) const {
  constexpr int64_t kMaxBlocks = 1024;
  const int64_t rows = int64_t{params.tokens} * params.heads;
  const int64_t blocks = std::min(ceil_div(rows, int64_t{kernel_.row_tile()}), kMaxBlocks);
  kernel_.launch({static_cast<uint32_t>(blocks), static_cast<uint32_t>(arrays)}, params, launcher,
                 kOverlapped);
}

}  // namespace fovea::kernels::cuda
