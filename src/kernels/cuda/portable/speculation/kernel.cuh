// SPDX-License-Identifier: Apache-2.0
// Drafts of a verification: what a pass needs to know of them, which of them are accepted, and the
// move of their rows. All widths are fixed, so the kernels can be captured. They overlap with the
// start of each other.
#pragma once

#include "kernels/cuda/portable/speculation/accept.cuh"
#include "kernels/cuda/portable/speculation/commit.cuh"

namespace fovea::kernels::cuda {

// A thread describes a node, a block a request.
struct DescribeConfig {
  using Params = DescribeDraftsParams;
  static constexpr int kBlocksPerSm = 1;
  static constexpr KernelTraits kTraits = {kMaxNodes, 0, 1, 0};

  __device__ static void run(const Params& params) {
    wait_and_allow_next();
    const int node = static_cast<int>(threadIdx.x);
    if (node < params.trees.width) describe_node(params, static_cast<int>(blockIdx.x), node);
  }
};

template <Op kOp>
struct OpConfig;
template <>
struct OpConfig<describe_drafts> : DescribeConfig {};
template <>
struct OpConfig<accept_tokens> : AcceptTokensConfig {};
template <>
struct OpConfig<accept_sampled> : AcceptSampledConfig {};
template <>
struct OpConfig<commit_drafts> : CommitConfig {};

template <Op kOp>
using Config = OpConfig<kOp>;

}  // namespace fovea::kernels::cuda
