// SPDX-License-Identifier: Apache-2.0
// Cascade attention on the CPU. Every level of shared prefixes is a pass over a batch of groups,
// the last pass attends to the keys outside all groups, and the states of all passes are merged.
#pragma once

#include <array>

#include "attention/host/pass_states.h"
#include "attention/prefix_levels.h"

namespace fovea {

class HostPrefixes {
 public:
  void carve(WorkspaceCarver& workspace, const HostShape& shape,
             const HostKernels::Shape& kernel_shape, const BatchLimits& limits);

  // Finds the groups of the batch in `params`, which have its page table. Returns false, without
  // any change, if nothing is shared. Throws Error{invalid_argument} if shared_prefix names tokens
  // in different pages.
  bool plan(const BatchView& batch, const kernels::AttentionParams& params, int32_t page_size);
  const int32_t* first_keys() const { return first_keys_; }

  // Attends. `params`: the whole batch. `schedule`: its last pass.
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
  int32_t max_tokens_ = 0;         // limit of passes with groups
  int32_t* first_keys_ = nullptr;  // [requests] first keys of the last pass
  HostPassStates states_;          // the last pass, then the levels
};

}  // namespace fovea
