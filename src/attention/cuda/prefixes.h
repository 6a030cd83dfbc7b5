// SPDX-License-Identifier: Apache-2.0
// Cascade attention on a GPU. Every level of shared prefixes is a pass over a batch of groups, the
// backend's own kernels attend to the keys outside all groups, and the states are joined. Groups
// are found on the device, so a captured pass serves any sharing.
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

// Returns the levels that a backend reserves for; 0: it shares no prefixes.
int32_t prefix_levels(const CudaKernels& table, const AttentionSpec& spec,
                      const BatchLimits& limits);

// Returns the kernels that CudaPrefixes needs besides those of the family.
std::vector<gpu::KernelVariant> prefix_variants(const AttentionSpec& spec, int sm);

class CudaPrefixes {
 public:
  // Takes its part of the workspace. A carver with a null base only counts.
  void carve(WorkspaceCarver& workspace, const CudaKernels& table,
             const kernels::cuda::AttentionSetup& setup, const BatchLimits& limits);
  // Loads the kernels for the levels that carve() took. Error{unsupported} as Kernel's constructor.
  void load(const CudaKernels& table, const kernels::cuda::AttentionSetup& setup,
            gpu::KernelStore& store);

  // Returns true if the pass looks for shared prefixes.
  bool serves(const BatchView& batch) const {
    return levels_ > 0 && !batch.hints.shared_prefix.empty() &&
           batch.tokens <= limits_.max_tokens && max_saved_keys(batch, limits_) >= rule_.min_saved;
  }
  // Before the pass is planned: makes its plans find the groups, and sets the first keys outside
  // all groups in the `params` of the last pass.
  void find_groups(const BatchView& batch, kernels::cuda::BatchParams& params,
                   kernels::cuda::PlanTasks& tasks) const;
  // Plans the passes over groups. after_decode: the last pass is one launch of the kernel for short
  // requests.
  void plan(const BatchView& batch, const kernels::cuda::BatchParams& params, bool after_decode,
            kernels::cuda::PlanQueue& plans);
  // Returns the LSE of the last pass for callers that ask for none.
  float* own_lse() const { return own_lse_; }
  // After the last pass, which had these `params`: attends to the groups.
  void attend(const kernels::cuda::AttentionParams& params, int32_t layer,
              gpu::Launcher launcher) const;
  // Joins the states of all passes. `lse`: the caller's, or null.
  void join(const kernels::cuda::AttentionParams& params, float* lse, gpu::Launcher launcher);

 private:
  struct Level {
    kernels::cuda::PrefixGroups groups{};
    float* out = nullptr;  // [limits_.max_tokens, q_heads, head_dim_v]
    float* lse = nullptr;  // [limits_.max_tokens, q_heads]
    std::unique_ptr<kernels::cuda::AttentionKernel> kernel;
    kernels::cuda::PrefixState state{};  // the planned pass, for the join
  };

  int32_t levels_ = 0;
  BatchLimits limits_;  // for passes with groups
  PrefixRule rule_;
  int32_t row_tile_ = 0;  // largest row tile of the family that attends to groups
  std::array<Level, kMaxPrefixLevels> level_;
  int32_t* first_keys_ = nullptr;
  std::byte* plans_ = nullptr;  // [levels, level_bytes] workspaces of the family
  int64_t level_bytes_ = 0;
  int32_t* scratch_ = nullptr;
  float* own_lse_ = nullptr;
  // An earlier join of the planned pass has waited for the plan. True in captures too, however they
  // divide the pass: a graph starts after all earlier work in its stream.
  bool plan_complete_ = false;
  std::optional<kernels::cuda::PrefixJoin> join_;
};

}  // namespace fovea
