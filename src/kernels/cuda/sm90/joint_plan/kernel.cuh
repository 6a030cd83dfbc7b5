// SPDX-License-Identifier: Apache-2.0
// All plans of a pass that has several, in one launch: those of decode and prefill in a mixed
// batch, those of the last pass and of all levels in a cascade. None reads what another writes.
//
//   blocks    | decode, decode ... | prefill | level 0, level 1 ... | page table ... |
//
// In a cascade each block that plans finds the groups itself, which takes less time than waiting
// for another block.
#pragma once

#include "kernels/cuda/common/joint_plan_params.h"
#include "kernels/cuda/common/prefix_groups.cuh"
#include "kernels/cuda/portable/plan/planner.cuh"
#include "kernels/cuda/sm90/decode_plan/planner.cuh"
#include "kernels/cuda/sm90/prefill_order/orderer.cuh"

namespace fovea::kernels::cuda {

template <int kGrain, int kOverhead>
struct JointPlanner {
  using Params = JointPlanParams;
  using Finder = PrefixGroupsFinder<kPlanThreads>;
  using Narrow = DecodePlanner<8, kGrain, kOverhead, PlannedRole::concurrent>;
  using Wide = DecodePlanner<16, kGrain, kOverhead, PlannedRole::concurrent>;
  using Prompts = PrefillOrderer<kPlanThreads, whole>;
  using Groups = WorkPlanner<128>;
  using WideGroups = WorkPlanner<64>;  // heads of more than 128 columns
  static constexpr int kBlocksPerSm = 1;

  struct SharedMemory {
    typename Finder::SharedMemory finder;
    union {
      typename Narrow::SharedMemory narrow;
      typename Wide::SharedMemory wide;
      typename Prompts::SharedMemory prompts;
      typename Groups::SharedMemory groups;
      typename WideGroups::SharedMemory wide_groups;
    };
  };
  static constexpr KernelTraits kTraits = {kPlanThreads, sizeof(SharedMemory), 0, kGrain};

  template <class Planner>
  __device__ static void plan_groups(const Params& params, int level,
                                     typename Planner::SharedMemory& shared) {
    PlanParams plan = params.groups;
    Planner::turn_to_level(plan, params.tasks, level);
    Planner::plan(plan, Planner::of_level(params.group_parts, params.tasks, level), shared);
  }

  __device__ static void plan(const Params& params, SharedMemory& shared) {
    const PrefixGroupsParams& prefixes = params.tasks.prefixes;
    const int block = static_cast<int>(blockIdx.x);
    const int level = block - params.decode_blocks - params.order_blocks;
    if (level >= 0) {
      Finder::run(prefixes, level + 1, level, shared.finder);
      if (params.group_rows == Groups::kTraits.row_tile) {
        plan_groups<Groups>(params, level, shared.groups);
      } else {
        plan_groups<WideGroups>(params, level, shared.wide_groups);
      }
      return;
    }
    typename Finder::Found found = {};
    if (prefixes.levels > 0)
      found = Finder::run(prefixes, prefixes.levels, prefixes.levels, shared.finder);
    if (block < params.decode_blocks) {
      DecodePlanParams own = params.decode;
      own.batch.mask.first_keys = found.first_keys;
      if (params.decode_rows == Narrow::kTraits.row_tile) {
        Narrow::plan(own, block, params.decode_blocks, found.pairs, shared.narrow);
      } else {
        Wide::plan(own, block, params.decode_blocks, found.pairs, shared.wide);
      }
    } else {
      PrefillOrderParams own = params.order;
      own.batch.mask.first_keys = found.first_keys;
      Prompts::order(own, shared.prompts);
    }
  }

  __device__ static void run(const Params& params) {
    extern __shared__ __align__(16) char dynamic_shared[];
    wait_for_previous_kernel();
    allow_next_kernel();
    const int block =
        static_cast<int>(blockIdx.x) - static_cast<int>(gridDim.x) + params.table_blocks;
    if (block >= 0) {
      write_page_table(params.tasks.pages, block, params.table_blocks);
    } else {
      plan(params, *reinterpret_cast<SharedMemory*>(dynamic_shared));
    }
  }
};

template <int kGrain, int kOverhead>
using Config = JointPlanner<kGrain, kOverhead>;

}  // namespace fovea::kernels::cuda
