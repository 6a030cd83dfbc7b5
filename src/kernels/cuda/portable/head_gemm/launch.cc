// SPDX-License-Identifier: Apache-2.0
#include "core/check.h"
#include "kernels/cuda/attention_kernel.h"
#include "kernels/cuda/family.h"
#include "kernels/cuda/head_gemm.h"

namespace fovea::kernels::cuda {
namespace {

// Tokens up to which the small tile, which reads the weights once for 16 of them, is used.
constexpr int32_t kFewTokens = 32;

}  // namespace

std::vector<gpu::KernelVariant> HeadGemm::variants(WeightOrder order, DType dtype, int sm) {
  const auto type = variant_type(dtype);
  check_argument(type && !is_fp8(dtype), "dtype is {}, accepted: bf16, f16", dtype_name(dtype));
  const std::string is_kn = order == WeightOrder::kn ? "true" : "false";
  const Family& gemm = family("portable/head_gemm");
  return {make_variant(gemm, {"16", is_kn, *type}, sm),
          make_variant(gemm, {"128", is_kn, *type}, sm)};
}

HeadGemm::HeadGemm(WeightOrder order, DType dtype, int sm, gpu::KernelStore& store) {
  const std::vector<gpu::KernelVariant> needed = variants(order, dtype, sm);
  few_ = Kernel(needed[0], store);
  many_ = Kernel(needed[1], store);
}

void HeadGemm::run(HeadGemmParams params, int32_t heads, Stream stream) const {
  const Kernel& kernel = params.tokens <= kFewTokens ? few_ : many_;
  params.row_tiles = (params.tokens + kernel.row_tile() - 1) / kernel.row_tile();
  const int32_t column_tiles = (params.n + kernel.key_tile() - 1) / kernel.key_tile();
  kernel.launch(
      {static_cast<uint32_t>(params.row_tiles * column_tiles), static_cast<uint32_t>(heads)},
      params, stream);
}

}  // namespace fovea::kernels::cuda
