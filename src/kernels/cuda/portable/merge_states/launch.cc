// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/portable/merge_states/launch.h"

#include <algorithm>

#include "core/check.h"
#include "core/rounding.h"
#include "kernels/cuda/attention_kernel.h"
#include "kernels/cuda/family.h"

namespace fovea::kernels::cuda {

gpu::KernelVariant merge_states_variant(DType dtype, int sm) {
  const auto type = variant_type(dtype);
  check_argument(type.has_value() && !is_fp8(dtype), "no kernel merges states of {}",
                 dtype_name(dtype));
  return make_variant(family("portable/merge_states"), {*type}, sm);
}

MergeStates::MergeStates(DType dtype, int sm, gpu::KernelStore& store)
    : kernel_(merge_states_variant(dtype, sm), store) {}

int64_t MergeStates::blocks(const MergeStatesParams& params) const {
  return ceil_div(int64_t{params.tokens} * params.heads, int64_t{kernel_.row_tile()});
}

void MergeStates::run(const MergeStatesParams& params, gpu::Launcher launcher) const {
  kernel_.launch({static_cast<uint32_t>(blocks(params))}, params, launcher);
}

void MergeStates::run_overlapped(const MergeStatesParams& params, gpu::Launcher launcher) const {
  // More blocks than the GPU holds cost time where the part turns out to be empty.
  constexpr int64_t kMaxBlocks = 1024;
  kernel_.launch({static_cast<uint32_t>(std::min(blocks(params), kMaxBlocks))}, params, launcher,
                 kOverlapped);
}

}  // namespace fovea::kernels::cuda
