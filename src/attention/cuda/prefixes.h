// SPDX-License-Identifier: Apache-2.0
// Cascade attention on a GPU: every level of shared prefixes is a pass over a batch of groups, the
// backend's own kernels attend to the keys that belong to no group, and the states are joined. The
// groups are found on the device, so a captured pass serves any sharing.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <vector>

#include "attention/cuda/kernels.h"
#include "attention/prefix_levels.h"
#include "kernels/cuda/portable/prefix_join/launch.h"

namespace fovea {

static_assert(kMaxPrefixLevels == kernels::cuda::kPrefixLevels);

// Levels that a backend reserves for: 0 where prefixes are not shared.
int32_t prefix_levels(const CudaKernels& table, const AttentionSpec& spec,
                      const BatchLimits& limits);

// What CudaPrefixes needs besides the family's kernels.
std::vector<gpu::KernelVariant> prefix_variants(const AttentionSpec& spec, int sm);

class CudaPrefixes {
 public:
  // Takes its part of the workspace; over a null base the carver only counts.
  void carve(WorkspaceCarver& workspace, const CudaKernels& table,
             const kernels::cuda::AttentionSetup& setup, const BatchLimits& limits);
  // Loads what carve() found is needed. Error{unsupported} as Kernel's constructor.
  void load(const CudaKernels& table, const kernels::cuda::AttentionSetup& setup,
            gpu::KernelStore& store);

  // Whether a batch's prefixes are looked at.
  bool serves(const BatchView& batch) const {
    return levels_ > 0 && !batch.hints.shared_prefix.empty() &&
           batch.tokens <= limits_.max_tokens && max_saved_keys(batch, limits_) >= rule_.min_saved;
  }
  // Before the pass is planned: makes its launches find the groups, and gives the `params` of the
  // last pass the first keys that are in none.
  void find_groups(const BatchView& batch, kernels::cuda::BatchParams& params,
                   kernels::cuda::PlanCompany& company) const;
  // Plans the passes over groups. behind_decode: the last pass is one launch of the kernel for few
  // new tokens.
  void plan(const BatchView& batch, const kernels::cuda::BatchParams& params, bool behind_decode,
            kernels::cuda::PassPlan& pass);
  // Where the last pass leaves its LSE if nobody asked for one.
  float* own_lse() const { return own_lse_; }
  // Behind the last pass, whose `params` these are: attends to the groups.
  void attend(const kernels::cuda::AttentionParams& params, int32_t layer, Stream stream) const;
  // `lse` is what the caller asked for.
  void join(const kernels::cuda::AttentionParams& params, float* lse, Stream stream);

 private:
  struct Level {
    kernels::cuda::PrefixGroups groups{};
    float* out = nullptr;  // [limits_.max_tokens, q_heads, head_dim_v]
    float* lse = nullptr;  // [limits_.max_tokens, q_heads]
    std::unique_ptr<kernels::cuda::AttentionKernel> kernel;
  };

  int32_t levels_ = 0;
  BatchLimits limits_;  // of passes with groups
  PrefixRule rule_;
  int32_t row_tile_ = 0;  // of the family that attends to groups, at most
  std::array<Level, kMaxPrefixLevels> level_;
  int32_t* first_keys_ = nullptr;
  std::byte* plans_ = nullptr;  // the family's of each level
  int64_t level_bytes_ = 0;
  int32_t* scratch_ = nullptr;
  float* own_lse_ = nullptr;
  // A join of the planned pass has waited for its plan. Holds in captures too, wherever they cut
  // the pass: a graph starts when all that was enqueued ahead of it has ended.
  bool list_settled_ = false;
  std::optional<kernels::cuda::PrefixJoin> join_;
};

}  // namespace fovea
