// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "core/check.h"
#include "core/rounding.h"
#include "kernels/cuda/attention_kernel.h"
#include "kernels/cuda/family.h"
#include "kernels/cuda/head_gemm.h"

namespace fovea::kernels::cuda {
namespace {

// The small tile reads the weights once for 16 tokens. It is used for up to so many of them, or so
// many weights: with 16 heads 128 tokens, whose decode with its projections takes 68.5 instead
// of 75.5 us at 128x1k, but not with 128 heads (323 and 277 at 128x4k; H100, 2026-11-27).
constexpr int32_t kFewTokens = 32;
constexpr int64_t kFewWeights = 8 << 20;
// CTAs that fill any GPU several times over.
constexpr int32_t kManyCtas = 1024;

}  // namespace

std::vector<gpu::KernelVariant> HeadGemm::variants(WeightOrder order, DType dtype, int sm) {
  const auto type = variant_type(dtype);
  check_argument(type && !is_fp8(dtype), "dtype is {}, accepted: bf16, f16", dtype_name(dtype));
  const std::string is_kn = order == WeightOrder::kn ? "true" : "false";
  const Family& gemm = family("portable/head_gemm");
  return {make_variant(gemm, {"16", is_kn, "false", *type}, sm),
          make_variant(gemm, {"128", is_kn, "false", *type}, sm),
          make_variant(gemm, {"128", is_kn, "true", *type}, sm)};
}

HeadGemm::HeadGemm(WeightOrder order, DType dtype, int sm, gpu::KernelStore& store) {
  const std::vector<gpu::KernelVariant> needed = variants(order, dtype, sm);
  few_ = Kernel(needed[0], store);
  many_ = Kernel(needed[1], store);
  several_tiles_ = Kernel(needed[2], store);
}

void HeadGemm::run(HeadGemmParams params, Stream stream) const {
  const int64_t weights = int64_t{params.heads} * params.n * params.k;
  const bool few = params.tokens <= kFewTokens ||
                   ceil_div(params.tokens, few_.row_tile()) * weights <= kFewWeights;
  const Kernel& shape = few ? few_ : many_;
  params.row_tiles = ceil_div(params.tokens, shape.row_tile());
  params.groups = params.heads * ceil_div(params.n, shape.key_tile());
  const bool several = !few && params.skip && params.row_tiles * params.groups > kManyCtas;
  if (several) params.groups = std::min(params.groups, ceil_div(kManyCtas, params.row_tiles));
  const GridSize grid{static_cast<uint32_t>(params.row_tiles * params.groups)};
  // CTAs that begin early gather on the multiprocessors that fall free first. That is no matter
  // where they wait for weights, but products take longer there: 8x64 tokens over 8k with 16 heads
  // 297 instead of 290 us (H100, 2026-11-27).
  if (few) return few_.launch_overlapped(grid, params, stream);
  (several ? several_tiles_ : many_).launch(grid, params, stream);
}

}  // namespace fovea::kernels::cuda
