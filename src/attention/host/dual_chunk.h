// SPDX-License-Identifier: Apache-2.0
// Dual chunk attention on the CPU: keys of a token's own chunk, of the one before and of older ones
// are passes with a query of their own, joined by LSE.
#pragma once

#include <array>
#include <string>

#include "attention/host/pass_states.h"

namespace fovea {

// For explain(), of layers that have dual_chunk.
std::string describe_dual_chunk(const AttentionSpec& spec);

class HostDualChunk {
 public:
  void carve(WorkspaceCarver& workspace, const HostShape& shape,
             const HostKernels::Shape& kernel_shape, const BatchLimits& limits);

  // `params` hold the batch.
  void plan(const kernels::AttentionParams& params);

  // What has_rope asks for: `layer` with q and k rotated, the latter into rotated_k.
  LayerTensors rotated(const LayerTensors& layer, const kernels::AttentionParams& batch,
                       const HeadRows& rotated_k, ThreadPool& threads) const;

  // `params` of the batch and of a layer whose queries for other chunks are q_succ and q_inter.
  void run(const kernels::AttentionParams& params, const HeadRows& q_succ, const HeadRows& q_inter,
           ThreadPool& threads) const;

 private:
  static constexpr int32_t kPasses = 3;

  struct Pass {
    std::span<std::byte> workspace;
    HostKernels::Schedule schedule;
  };

  kernels::AttentionParams params_of(const kernels::AttentionParams& batch, int32_t pass) const;

  const HostKernels* kernels_ = nullptr;
  HostKernels::Shape shape_;
  DualChunk chunks_;
  std::array<Pass, kPasses> passes_;
  int32_t used_ = 0;  // passes that some token of the planned batch has keys in
  HostPassStates states_;
  // With has_rope.
  HeadRows q_succ_, q_inter_;     // [max_tokens, q_heads, head_dim]
  int32_t* positions_ = nullptr;  // [passes, max_tokens]
};

}  // namespace fovea
