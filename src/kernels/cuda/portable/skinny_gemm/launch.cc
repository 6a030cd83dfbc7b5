// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/portable/skinny_gemm/launch.h"

#include "core/rounding.h"
#include "kernels/cuda/family.h"

namespace fovea::kernels::cuda {
namespace {

// Returns true if a block can have more than 99 KB of shared memory, which sm_86, sm_89 and sm_120
// do not allow.
bool has_large_shared_memory(int sm) { return sm == 80 || sm == 87 || (sm >= 90 && sm < 120); }

}  // namespace

SkinnyProducts::SkinnyProducts(int sm, gpu::KernelStore& store) {
  const Family& gemm = family("portable/skinny_gemm");
  for (size_t i = 0; i < kStages.size(); ++i) {
    const char* const stages = kStages[has_large_shared_memory(sm) ? i : 0];
    kernels_[i] = Kernel(make_variant(gemm, {stages}, sm), store);
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

// Chosen on H200, 2026-11-29: one block a multiprocessor needs more stages than two.
size_t SkinnyProducts::variant_of(const SkinnyGemmParams& params) {
  constexpr int32_t kMultiprocessors = 132;
  constexpr int32_t kTileRows = 32;
  const int32_t weight_rows = params.up_offset > 0 ? 2 * params.n : params.n;
  return weight_rows > kTileRows * kMultiprocessors ? 0 : 1;
}

void SkinnyProducts::run(const SkinnyGemmParams& params, Stream stream) const {
  run(params, variant_of(params), stream);
}

void SkinnyProducts::run(const SkinnyGemmParams& params, size_t variant, Stream stream) const {
  const Kernel& kernel = kernels_[variant];
  const int32_t columns = params.up_offset > 0 ? kernel.key_tile() / 2 : kernel.key_tile();
  kernel.launch({static_cast<uint32_t>(ceil_div(params.n, columns))}, params, stream, kOverlapped);
}

}  // namespace fovea::kernels::cuda
