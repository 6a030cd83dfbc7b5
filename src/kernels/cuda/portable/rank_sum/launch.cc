// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/portable/rank_sum/launch.h"

#include "core/rounding.h"
#include "kernels/cuda/family.h"

namespace fovea::kernels::cuda {
namespace {

Kernel load(const char* op, const char* threads, int sm, gpu::KernelStore& store) {
  return Kernel(make_variant(family("portable/rank_sum"), {op, threads}, sm), store);
}

bool is_aligned(const void* address, uintptr_t bytes) {
  return reinterpret_cast<uintptr_t>(address) % bytes == 0;
}

}  // namespace

RankSum::RankSum(int sm, gpu::KernelStore& store)
    : values_(load("values", "256", sm, store)),
      residual_(load("residual", "256", sm, store)),
      long_residual_(load("residual", "512", sm, store)) {}

bool RankSum::serves(const SumResidualParams& params) {
  const ResidualParams& step = params.residual;
  return int64_t{step.rows} * step.dim <= params.boxes.part_stride && step.dim % 4 == 0 &&
         step.dim <= kMaxDim && step.normed_stride % 4 == 0 && is_aligned(step.x, 16) &&
         is_aligned(step.branch, 16) && is_aligned(step.normed, 8) &&
         is_aligned(step.norm.weight, 16) && is_aligned(step.branch_norm.weight, 16);
}

bool RankSum::serves(const SumValuesParams& params) {
  return params.count <= params.boxes.part_stride && params.count % 4 == 0 &&
         is_aligned(params.send, 16) && is_aligned(params.receive, 16);
}

void RankSum::add(const SumResidualParams& params, Stream stream) const {
  const bool fits = params.residual.dim <= residual_.key_tile();
  const Kernel& kernel = fits ? residual_ : long_residual_;
  kernel.launch({static_cast<uint32_t>(params.residual.rows)}, params, stream, kOverlapped);
}

void RankSum::sum(const SumValuesParams& params, Stream stream) const {
  const int64_t blocks = ceil_div(params.count, int64_t{values_.row_tile()});
  values_.launch({static_cast<uint32_t>(blocks)}, params, stream, kOverlapped);
}

}  // namespace fovea::kernels::cuda
