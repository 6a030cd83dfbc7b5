// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/portable/merge/launch.h"

#include <string>

#include "core/check.h"
#include "kernels/cuda/attention_kernel.h"
#include "kernels/cuda/family.h"

namespace fovea::kernels::cuda {
namespace {

// Rows of a block. With all rows of a tile in one block a few tiles of many parts, as shared
// prefixes give, would keep few SMs busy.
constexpr int32_t kBlockRows = 16;

MergeParams merge_params(const AttentionParams& params) {
  return {.batch = params.batch,
          .work = params.work,
          .out = params.out,
          .out_token_stride = params.out_token_stride,
          .out_head_stride = params.out_head_stride,
          .lse = params.lse,
          .lse_token_stride = params.lse_token_stride,
          .sinks = params.sinks,
          .head_dim_v = params.head_dim_v,
          .f32_out = params.f32_out};
}

}  // namespace

gpu::KernelVariant merge_variant(int32_t row_tile, DType out, int sm) {
  const auto type = variant_type(out);
  check_argument(type.has_value(), "no kernel writes {}", dtype_name(out));
  return make_variant(family("portable/merge"), {std::to_string(row_tile), *type}, sm);
}

void Merge::run(const AttentionParams& params, gpu::Launcher launcher) const {
  const GridSize grid{static_cast<uint32_t>(params.work.ctas),
                      static_cast<uint32_t>(kernel_.row_tile() / kBlockRows)};
  kernel_.launch(grid, merge_params(params), launcher, kOverlapped);
}

}  // namespace fovea::kernels::cuda
