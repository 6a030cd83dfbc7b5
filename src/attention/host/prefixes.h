// SPDX-License-Identifier: Apache-2.0
// Cascade attention on the CPU: every level of shared prefixes is a pass over a batch of groups,
// the keys that belong to no group are the last pass, and the states of all passes are merged.
#pragma once

#include <array>

#include "attention/host/pass_states.h"
#include "attention/prefix_levels.h"

namespace fovea {

class HostPrefixes {
 public:
  void carve(WorkspaceCarver& workspace, const HostShape& shape,
             const HostKernels::Shape& kernel_shape, const BatchLimits& limits);

  // Gives `params`, which hold the batch and its page table, the first keys of the last pass.
  // False: nothing is shared and nothing was changed. Throws Error{invalid_argument} where
  // shared_prefix names tokens in different pages.
  bool plan(const BatchView& batch, const kernels::AttentionParams& params, int32_t page_size);
  const int32_t* first_keys() const { return first_keys_; }

  // `params` of the whole batch and `schedule` of its last pass.
  void run(const kernels::AttentionParams& params, const HostKernels::Schedule& schedule,
           ThreadPool& threads) const;

 private:
  struct Level {
    PrefixLevel groups;
    std::span<std::byte> workspace;
    HostKernels::Schedule schedule;
  };

  kernels::AttentionParams params_of(const kernels::AttentionParams& batch,
                                     const PrefixLevel& groups) const;
  void check_pages(const BatchView& batch, const kernels::AttentionParams& params,
                   int32_t page_size) const;

  const HostKernels* kernels_ = nullptr;
  HostKernels::Shape shape_;
  std::array<Level, kMaxPrefixLevels> levels_;
  int32_t reserved_ = 0, used_ = 0;  // levels
  PrefixRule rule_;
  int32_t most_tokens_ = 0;        // of a pass with groups
  int32_t* first_keys_ = nullptr;  // [requests] of the last pass
  HostPassStates states_;          // of the last pass, then of the levels
};

}  // namespace fovea
