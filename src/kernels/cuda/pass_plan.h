// SPDX-License-Identifier: Apache-2.0
// What plan() launches for a pass: one plan or, of a mixed batch or a cascade, several.
#pragma once

#include <array>

#include "gpu/kernel_pack.h"
#include "kernels/cuda/common/pass_plan_params.h"
#include "kernels/cuda/kernel.h"

namespace fovea::kernels::cuda {

// Blocks that write this page table beside a plan; 0 if it has no requests.
int32_t page_table_blocks(const TableWriteParams& pages);

// Enqueues a plan of `blocks` blocks and, behind them, those that write the page table.
template <typename Plan>
void launch_plan(const Kernel& kernel, uint32_t blocks, const Plan& plan,
                 const PlanCompany& company, Stream stream) {
  const int32_t table_blocks = page_table_blocks(company.pages);
  kernel.launch_overlapped({blocks + static_cast<uint32_t>(table_blocks)},
                           PlanLaunch<Plan>{plan, company, table_blocks}, stream);
}

// Collects the plans of a pass; the kernels that are added must outlive it.
class PassPlan {
 public:
  explicit PassPlan(const PlanCompany& company) : company_(company) {}

  void add(const Kernel& kernel, uint32_t blocks, const DecodePlanParams& plan) {
    decode_ = {&kernel, blocks, plan};
  }
  void add(const Kernel& kernel, const PrefillOrderParams& plan) { order_ = {&kernel, 1, plan}; }
  void add(const Kernel& kernel, const PlanParams& plan) {
    works_[works_[0].kernel != nullptr] = {&kernel, 1, plan};
  }
  bool has_prefixes() const { return company_.prefixes.levels > 0; }
  // The groups of a cascade: of level 0, the others have theirs PlanCompany::level_bytes behind.
  // parts: of groups whose parts nobody merges before they are joined with the last pass.
  void add_groups(const Kernel& kernel, const PlanParams& plan, GroupParts* parts = nullptr) {
    groups_ = {&kernel, static_cast<uint32_t>(company_.prefixes.levels), plan};
    group_parts_ = parts;
  }

  // `joint`, sm90/pass_plan: plans several of them in one launch. Null: they are launched one
  // behind the other.
  void launch(const Kernel* joint, Stream stream) const;

 private:
  template <typename Plan>
  struct Part {
    const Kernel* kernel = nullptr;
    uint32_t blocks = 0;
    Plan plan{};
  };

  void launch_jointly(const Kernel& joint, Stream stream) const;
  void launch_in_turn(Stream stream) const;

  PlanCompany company_;
  Part<DecodePlanParams> decode_;
  Part<PrefillOrderParams> order_;
  std::array<Part<PlanParams>, 2> works_;  // of a mixed batch two
  Part<PlanParams> groups_;
  GroupParts* group_parts_ = nullptr;
};

gpu::KernelVariant pass_plan_variant(int sm);

}  // namespace fovea::kernels::cuda
