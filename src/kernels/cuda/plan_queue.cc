// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/plan_queue.h"

#include <algorithm>

#include "kernels/cuda/family.h"

namespace fovea::kernels::cuda {

int32_t page_table_blocks(const TableWriteParams& pages) {
  constexpr int64_t kEntries =
      512;  // entries of a block: one per thread, unless blocks reach their maximum
  constexpr int64_t kMaxBlocks = 256;
  const int64_t entries = pages.requests * pages.page_table_stride;
  return static_cast<int32_t>(std::min((entries + kEntries - 1) / kEntries, kMaxBlocks));
}

void PlanQueue::launch(const Kernel* joint, gpu::Launcher launcher) const {
  const int plans =
      (decode_.kernel != nullptr) + (order_.kernel != nullptr) + (groups_.kernel != nullptr);
  if (joint != nullptr && plans > 1) return launch_jointly(*joint, launcher);
  launch_in_turn(launcher);
}

void PlanQueue::launch_jointly(const Kernel& joint, gpu::Launcher launcher) const {
  JointPlanParams params{};
  params.decode = decode_.plan;
  params.order = order_.plan;
  params.groups = groups_.plan;
  params.group_parts = group_parts_;
  params.tasks = tasks_;
  params.decode_blocks = static_cast<int32_t>(decode_.blocks);
  params.order_blocks = static_cast<int32_t>(order_.blocks);
  params.table_blocks = page_table_blocks(tasks_.pages);
  if (decode_.kernel != nullptr) params.decode_rows = decode_.kernel->row_tile();
  if (groups_.kernel != nullptr) params.group_rows = groups_.kernel->row_tile();
  const uint32_t plans = decode_.blocks + order_.blocks + groups_.blocks;
  joint.launch({plans + static_cast<uint32_t>(params.table_blocks)}, params, launcher, kOverlapped);
}

// No plan reads what another one writes, so all plans start at once.
void PlanQueue::launch_in_turn(gpu::Launcher launcher) const {
  PlanTasks tasks = tasks_;
  for (PrefixGroups& groups : tasks.prefixes.groups) groups = {};
  tasks.level_bytes = 0;
  const auto launch = [&](const auto& part) {
    if (part.kernel == nullptr) return;
    launch_plan(*part.kernel, part.blocks, part.plan, tasks, launcher);
    tasks.pages = {};
    tasks.follows_plan = true;
    if (tasks.prefixes.scratch == nullptr) return;
    tasks.prefixes.scratch += int64_t{part.blocks} * tasks.prefixes.requests * kPrefixScratch;
  };
  launch(decode_);
  launch(order_);
  for (const Part<PlanParams>& work : works_) launch(work);
  launch(latent_);
  std::ranges::copy(tasks_.prefixes.groups, tasks.prefixes.groups);
  tasks.prefixes.first_keys = nullptr;
  tasks.level_bytes = tasks_.level_bytes;
  launch(groups_);
}

}  // namespace fovea::kernels::cuda
