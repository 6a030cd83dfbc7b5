// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/portable/mla_prefill/launch.h"

#include <algorithm>
#include <string>

#include "core/rounding.h"
#include "kernels/cuda/attention_kernel.h"
#include "kernels/cuda/family.h"

namespace fovea::kernels::cuda {
namespace {

// More blocks than the GPU holds cost time where a chunk turns out to be empty.
uint32_t blocks(int64_t rows, const Kernel& kernel) {
  constexpr int64_t kMaxBlocks = 1024;
  return static_cast<uint32_t>(std::min(ceil_div(rows, kernel.row_tile()), kMaxBlocks));
}

}  // namespace

std::vector<gpu::KernelVariant> MlaPrefillSteps::variants(DType stored, DType multiplied, int sm) {
  const auto variant = [&](const char* step, const std::string& type, const std::string& out) {
    return make_variant(family("portable/mla_prefill"), {step, type, out}, sm);
  };
  // Only fp8 codes are converted; other elements are moved as they are.
  return {variant("forms", "bf16", "bf16"),
          is_fp8(stored) ? variant("gather", *variant_type(stored), *variant_type(multiplied))
                         : variant("gather", "bf16", "bf16"),
          variant("join", "bf16", "bf16")};
}

MlaPrefillSteps::MlaPrefillSteps(DType stored, DType multiplied, int sm, gpu::KernelStore& store) {
  const std::vector<gpu::KernelVariant> needed = variants(stored, multiplied, sm);
  forms_ = Kernel(needed[0], store);
  gather_ = Kernel(needed[1], store);
  join_ = Kernel(needed[2], store);
}

void MlaPrefillSteps::choose_forms(const MlaFormsParams& params, gpu::Launcher launcher) const {
  forms_.launch({}, params, launcher, kOverlapped);
}

void MlaPrefillSteps::gather(const MlaGatherParams& params, gpu::Launcher launcher) const {
  gather_.launch({blocks(params.max_rows, gather_)}, params, launcher, kOverlapped);
}

void MlaPrefillSteps::join_queries(const MlaJoinParams& params, gpu::Launcher launcher) const {
  join_.launch({blocks(int64_t{params.tokens} * params.heads, join_)}, params, launcher,
               kOverlapped);
}

}  // namespace fovea::kernels::cuda
