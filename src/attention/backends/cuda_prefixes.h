// SPDX-License-Identifier: Apache-2.0
// Cascade attention on a GPU: every level of shared prefixes is a pass over a batch of groups, the
// backend's own kernels attend to the keys that belong to no group, and the states are joined. The
// groups are found on the device, so a captured pass serves any sharing.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <vector>

#include "attention/backends/cuda_kernels.h"
#include "attention/prefix_levels.h"
#include "kernels/cuda/common/prefix_params.h"

namespace fovea {

static_assert(kMaxPrefixLevels == kernels::cuda::kPrefixLevels);
// One launch plans all levels, a block each.
static_assert(kMaxPrefixLevels <= kernels::cuda::kMostPlanBlocks);

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
            const BatchLimits& limits, gpu::KernelStore& store);

  // Whether a batch's prefixes are looked at.
  bool serves(const BatchView& batch) const {
    return levels_ > 0 && batch.shared_prefix != nullptr;
  }
  // Before the last pass is planned: gives its `params` the first keys that are in no group.
  void leave_to_groups(kernels::cuda::BatchParams& params) const {
    params.mask.first_keys = first_keys_;
  }
  // Plans the passes over groups, in one launch behind the last pass's plans.
  void plan(const BatchView& batch, const kernels::cuda::BatchParams& params, Stream stream) const;
  // What the last pass's plans find before they plan; there may be two, beside each other.
  kernels::cuda::PlanCompany last_plan(const BatchView& batch,
                                       const kernels::cuda::BatchParams& params,
                                       int32_t number) const;
  // Before the last pass, whose `params` these are: attends to the groups. Gives it a place for its
  // LSE if nobody asked for one.
  void attend(kernels::cuda::AttentionParams& params, int32_t layer, Stream stream) const;
  // After the last pass. `lse` is what the caller asked for.
  void join(const kernels::cuda::AttentionParams& params, float* lse, Stream stream) const;

 private:
  struct Level {
    kernels::cuda::PrefixGroups groups{};
    float* out = nullptr;  // [max_tokens, q_heads, head_dim_v]
    float* lse = nullptr;  // [max_tokens, q_heads]
    std::unique_ptr<kernels::cuda::AttentionKernel> kernel;
  };

  static constexpr int32_t kLastPlans = 2;
  // For launch `number` of those that plan the pass.
  kernels::cuda::PrefixGroupsParams groups(const BatchView& batch,
                                           const kernels::cuda::BatchParams& params,
                                           int32_t number) const;

  int32_t levels_ = 0;
  int32_t least_saved_ = 0;
  std::array<Level, kMaxPrefixLevels> level_;
  int32_t* first_keys_ = nullptr;
  std::byte* plans_ = nullptr;  // the family's of each level
  int64_t level_bytes_ = 0;
  std::array<int32_t*, 1 + kLastPlans> scratch_{};  // of each launch
  float* own_lse_ = nullptr;
  std::optional<kernels::cuda::Kernel> join_;
};

}  // namespace fovea
