// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/pass_plan.h"

#include <algorithm>

#include "kernels/cuda/family.h"

namespace fovea::kernels::cuda {

int32_t page_table_blocks(const TableWriteParams& pages) {
  constexpr int64_t kEntries = 512;  // of a block: one each of its threads, until there are most
  constexpr int64_t kMaxBlocks = 256;
  const int64_t entries = pages.requests * pages.page_table_stride;
  return static_cast<int32_t>(std::min((entries + kEntries - 1) / kEntries, kMaxBlocks));
}

void PassPlan::launch(const Kernel* joint, Stream stream) const {
  const int plans =
      (decode_.kernel != nullptr) + (order_.kernel != nullptr) + (groups_.kernel != nullptr);
  if (joint != nullptr && plans > 1) return launch_jointly(*joint, stream);
  launch_in_turn(stream);
}

void PassPlan::launch_jointly(const Kernel& joint, Stream stream) const {
  PassPlanParams params{};
  params.decode = decode_.plan;
  params.order = order_.plan;
  params.groups = groups_.plan;
  params.group_parts = group_parts_;
  params.company = company_;
  params.decode_blocks = static_cast<int32_t>(decode_.blocks);
  params.order_blocks = static_cast<int32_t>(order_.blocks);
  params.table_blocks = page_table_blocks(company_.pages);
  if (decode_.kernel != nullptr) params.decode_rows = decode_.kernel->row_tile();
  if (groups_.kernel != nullptr) params.group_rows = groups_.kernel->row_tile();
  const uint32_t plans = decode_.blocks + order_.blocks + groups_.blocks;
  joint.launch_overlapped({plans + static_cast<uint32_t>(params.table_blocks)}, params, stream);
}

// None reads what another writes: those behind the first begin at once.
void PassPlan::launch_in_turn(Stream stream) const {
  PlanCompany company = company_;
  for (PrefixGroups& groups : company.prefixes.groups) groups = {};
  company.level_bytes = 0;
  const auto launch = [&](const auto& part) {
    if (part.kernel == nullptr) return;
    launch_plan(*part.kernel, part.blocks, part.plan, company, stream);
    company.pages = {};
    company.behind_plan = true;
    if (company.prefixes.scratch == nullptr) return;
    company.prefixes.scratch += int64_t{part.blocks} * company.prefixes.requests * kPrefixScratch;
  };
  launch(decode_);
  launch(order_);
  for (const Part<PlanParams>& work : works_) launch(work);
  std::ranges::copy(company_.prefixes.groups, company.prefixes.groups);
  company.prefixes.first_keys = nullptr;
  company.level_bytes = company_.level_bytes;
  launch(groups_);
}

gpu::KernelVariant pass_plan_variant(int sm) {
  const Family& plans = family("sm90/pass_plan");
  return make_variant(plans, plans.baked.front(), sm);
}

}  // namespace fovea::kernels::cuda
