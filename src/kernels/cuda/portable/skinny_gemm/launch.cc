// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/portable/skinny_gemm/launch.h"

#include "core/rounding.h"
#include "kernels/cuda/family.h"

namespace fovea::kernels::cuda {

SkinnyProducts::SkinnyProducts(int sm, gpu::KernelStore& store) {
  const Family& gemm = family("portable/skinny_gemm");
  for (size_t i = 0; i < kTiles.size(); ++i) {
    kernels_[i] = Kernel(make_variant(gemm, {kTiles[i].columns, kTiles[i].rows}, sm), store);
  }
}

bool SkinnyProducts::serves(const SkinnyGemmParams& params) {
  constexpr uintptr_t kAlignment = 16;  // bytes of a copy
  constexpr int64_t kElements = 8;
  const auto is_aligned = [](const void* address) {
    return reinterpret_cast<uintptr_t>(address) % kAlignment == 0;
  };
  return params.rows >= 1 && params.rows <= kMaxRows && params.n >= 1 && params.k >= kSkinnyDepth &&
         params.k % kSkinnyDepth == 0 && is_aligned(params.x) && is_aligned(params.weight) &&
         params.x_stride % kElements == 0 && params.weight_stride % kElements == 0;
}

// Chosen on H200, 2026-11-29: wide tiles are faster where they give every multiprocessor several
// blocks one after another, and slower where all blocks run at once.
size_t SkinnyProducts::tile_of(const SkinnyGemmParams& params) {
  constexpr int32_t kManyRows = 16384;
  const int32_t weight_rows = params.up_offset > 0 ? 2 * params.n : params.n;
  return weight_rows >= kManyRows ? 1 : 0;
}

void SkinnyProducts::run(const SkinnyGemmParams& params, Stream stream) const {
  run(params, tile_of(params), stream);
}

void SkinnyProducts::run(const SkinnyGemmParams& params, size_t tile, Stream stream) const {
  const Kernel& kernel = kernels_[tile];
  const int32_t columns = params.up_offset > 0 ? kernel.key_tile() / 2 : kernel.key_tile();
  kernel.launch({static_cast<uint32_t>(ceil_div(params.n, columns))}, params, stream, kOverlapped);
}

}  // namespace fovea::kernels::cuda
