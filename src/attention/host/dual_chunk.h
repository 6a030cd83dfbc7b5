// SPDX-License-Identifier: Apache-2.0
// Dual chunk attention on the CPU. Keys of a token's own chunk, of the preceding chunk and of older
// chunks are three passes, each with its own query, joined by LSE.
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

  // With has_rope: returns `layer` with q and k rotated, k into rotated_k.
  LayerTensors rotated(const LayerTensors& layer, const kernels::AttentionParams& batch,
                       const HeadRows& rotated_k, ThreadPool& threads) const;

  // Attends. q_succ and q_inter: the layer's queries for the preceding and for older chunks.
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
  int32_t used_ = 0;  // passes in which a token of the planned batch has keys
  HostPassStates states_;
  // Used with has_rope.
  HeadRows q_succ_, q_inter_;     // [max_tokens, q_heads, head_dim]
  int32_t* positions_ = nullptr;  // [passes, max_tokens]
};

}  // namespace fovea
