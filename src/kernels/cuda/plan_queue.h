// SPDX-License-Identifier: Apache-2.0
// The launches of plan(): a pass has one plan, or several if its batch is mixed or shares prefixes.
#pragma once

#include <array>

#include "gpu/kernel_pack.h"
#include "kernels/cuda/common/joint_plan_params.h"
#include "kernels/cuda/common/mla_params.h"
#include "kernels/cuda/kernel.h"

namespace fovea::kernels::cuda {

// Returns the blocks that write a page table in the launch of a plan; 0 if it has no requests.
int32_t page_table_blocks(const TableWriteParams& pages);

// Launches a plan of `blocks` blocks, followed by those that write the page table.
template <typename Plan>
void launch_plan(const Kernel& kernel, uint32_t blocks, const Plan& plan, const PlanTasks& tasks,
                 gpu::Launcher launcher) {
  const int32_t table_blocks = page_table_blocks(tasks.pages);
  kernel.launch({blocks + static_cast<uint32_t>(table_blocks)},
                PlanKernelParams<Plan>{plan, tasks, table_blocks}, launcher, kOverlapped);
}

// Collects the plans of a pass. The added kernels must outlive it.
class PlanQueue {
 public:
  explicit PlanQueue(const PlanTasks& tasks) : tasks_(tasks) {}

  void add(const Kernel& kernel, uint32_t blocks, const DecodePlanParams& plan) {
    decode_ = {&kernel, blocks, plan};
  }
  void add(const Kernel& kernel, const PrefillOrderParams& plan) { order_ = {&kernel, 1, plan}; }
  void add(const Kernel& kernel, const PlanParams& plan) {
    works_[works_[0].kernel != nullptr] = {&kernel, 1, plan};
  }
  void add(const Kernel& kernel, const MlaPlanParams& plan) { latent_ = {&kernel, 1, plan}; }
  bool has_prefixes() const { return tasks_.prefixes.levels > 0; }
  // One level of a cascade. The work lists of the levels lie PlanTasks::level_bytes apart, so
  // level 0, which comes first, stands for all. parts: where the plan writes which partial results
  // stay unmerged until they are joined with the last pass.
  void add_groups(const Kernel& kernel, const PlanParams& plan, GroupParts* parts = nullptr) {
    if (groups_.kernel != nullptr) return;
    groups_ = {&kernel, static_cast<uint32_t>(tasks_.prefixes.levels), plan};
    group_parts_ = parts;
  }

  // Launches all plans: several of them by one launch of `joint`, which is sm90/joint_plan, or one
  // after the other if `joint` is null.
  void launch(const Kernel* joint, gpu::Launcher launcher) const;

 private:
  template <typename Plan>
  struct Part {
    const Kernel* kernel = nullptr;
    uint32_t blocks = 0;
    Plan plan{};
  };

  void launch_jointly(const Kernel& joint, gpu::Launcher launcher) const;
  void launch_in_turn(gpu::Launcher launcher) const;

  PlanTasks tasks_;
  Part<DecodePlanParams> decode_;
  Part<PrefillOrderParams> order_;
  std::array<Part<PlanParams>, 2> works_;  // two in a mixed batch
  Part<MlaPlanParams> latent_;
  Part<PlanParams> groups_;
  GroupParts* group_parts_ = nullptr;
};

}  // namespace fovea::kernels::cuda
