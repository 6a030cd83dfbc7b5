// SPDX-License-Identifier: Apache-2.0
#include "attention/host/pass_states.h"

#include "attention/host/row_copy.h"

namespace fovea {

void HostPassStates::carve(WorkspaceCarver& workspace, const HostShape& shape,
                           const HostKernels::Shape& kernel_shape, int32_t passes, int64_t tokens) {
  kernels_ = shape.kernels;
  shape_ = kernel_shape;
  rows_ = tokens * shape_.q_heads;
  out_ = workspace.take<float>(passes * rows_ * shape_.head_dim_v);
  lse_ = workspace.take<float>(passes * rows_);
}

void HostPassStates::run(int32_t pass, kernels::AttentionParams params,
                         const HostKernels::Schedule& schedule, ThreadPool& threads) const {
  params.out = dense_rows(out_ + pass * rows_ * shape_.head_dim_v, DType::f32, shape_.q_heads,
                          shape_.head_dim_v);
  params.lse = lse_ + pass * rows_;
  params.sinks = nullptr;
  kernels_->attention(shape_, params, schedule, threads);
}

void HostPassStates::join(int32_t passes, const kernels::AttentionParams& params,
                          ThreadPool& threads) const {
  const int64_t tokens = params.q_indptr[params.requests];
  kernels::MergeStatesParams merge;
  merge.o = merge.out = out_;
  merge.lse = lse_;
  merge.o_part_stride = rows_ * shape_.head_dim_v;
  merge.lse_part_stride = rows_;
  merge.parts = passes;
  merge.rows = tokens;
  merge.heads = params.q_heads;
  merge.dim = params.head_dim_v;
  merge.sinks = params.sinks;
  merge.out_lse = params.lse;
  kernels_->merge_states(merge, threads);
  copy_rows({.from = dense_rows(out_, DType::f32, params.q_heads, params.head_dim_v),
             .to = params.out,
             .tokens = tokens,
             .heads = params.q_heads,
             .dim = params.head_dim_v},
            threads);
}

}  // namespace fovea
