// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/portable/expert_gemm/launch.h"

#include "core/rounding.h"
#include "kernels/cuda/family.h"

namespace fovea::kernels::cuda {
namespace {

// Large tiles are faster from this many rows an expert on average.
constexpr int64_t kLargeTileRows = 32;

}  // namespace

ExpertGemm::Layout ExpertGemm::load(bool is_kn, int sm, gpu::KernelStore& store) {
  const Family& gemm = family("portable/expert_gemm");
  const char* const order = is_kn ? "true" : "false";
  return {.small_tiles = Kernel(make_variant(gemm, {"16", order}, sm), store),
          .large_tiles = Kernel(make_variant(gemm, {"64", order}, sm), store)};
}

ExpertGemm::ExpertGemm(int sm, gpu::KernelStore& store)
    : nk_(load(false, sm, store)), kn_(load(true, sm, store)) {}

void ExpertGemm::run(ExpertGemmParams params, int32_t experts, bool is_kn, Stream stream) const {
  const Layout& layout = is_kn ? kn_ : nk_;
  const bool large = int64_t{params.rows} * params.top_k >= kLargeTileRows * experts;
  const Kernel& kernel = large ? layout.large_tiles : layout.small_tiles;
  params.row_tiles = ceil_div(params.rows, kernel.row_tile());
  const int32_t column_tiles = ceil_div(params.n, kernel.key_tile()) * params.matrices;
  kernel.launch(
      {static_cast<uint32_t>(experts * params.row_tiles), static_cast<uint32_t>(column_tiles)},
      params, stream, kOverlapped);
}

}  // namespace fovea::kernels::cuda
