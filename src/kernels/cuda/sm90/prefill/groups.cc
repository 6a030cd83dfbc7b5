// SPDX-License-Identifier: Apache-2.0
// Attention to keys that many requests share, by warpgroup products over the plan of
// portable/attention. Parts are left to the join. What these do not serve is portable/attention's.
#include "kernels/cuda/family.h"
#include "kernels/cuda/portable/plan/launch.h"
#include "kernels/cuda/sm90/prefill/split_keys.h"

namespace fovea::kernels::cuda {
namespace {

using namespace prefill;

struct GroupVariants {
  gpu::KernelVariant plan, attention;
};

std::optional<GroupVariants> find_group_variants(const AttentionSetup& setup) {
  const auto parts = find_parts(setup, false);
  if (!parts) return std::nullopt;
  return GroupVariants{plan_variant(kPartRows, setup.sm), *parts};
}

struct Buffers {
  WorkList work;
  GroupParts* parts = nullptr;
};

Buffers carve(WorkspaceCarver& workspace, const AttentionSetup& setup, const BatchLimits& limits) {
  Buffers buffers;
  buffers.work =
      carve_work_list(workspace, setup, limits, {kPartRows, kPartRows}, setup.multiprocessors);
  const int64_t tiles = max_tiles(setup.spec, limits, kPartRows);
  buffers.parts = workspace.take<GroupParts>(tiles * setup.spec.kv_heads);
  return buffers;
}

class HopperGroups final : public AttentionKernel {
 public:
  HopperGroups(const AttentionSetup& setup, const GroupVariants& variants, gpu::KernelStore& store)
      : setup_(setup),
        plan_(variants.plan, store),
        parts_(setup, variants.attention, kPartRows, store) {}

  void reserve(const BatchLimits& limits, std::byte* workspace) override {
    WorkspaceCarver carver(workspace);
    buffers_ = carve(carver, setup_, limits);
  }

  void plan(const PlanRequest& request, PlanQueue& plans) override {
    tokens_ = request.tokens;
    concurrent_ = request.after_decode;
    PrefixState& state = *request.unmerged;
    state.parts = buffers_.parts;
    state.tile_indptr = buffers_.work.tile_indptr;
    state.part_out = buffers_.work.partial_out;
    state.part_lse = buffers_.work.partial_lse;
    state.row_tile = kPartRows;
    plans.add_groups(plan_, PlanParams{request.batch, buffers_.work, 0}, buffers_.parts);
  }

  // Results are f32: given.f32_out.
  void attend(const AttentionParams& given, int32_t layer, gpu::Launcher launcher) override {
    AttentionParams params = given;
    params.work = buffers_.work;
    parts_.attend(params, tokens_, concurrent_, false, layer, launcher);
  }

 private:
  AttentionSetup setup_;
  Kernel plan_;
  Parts parts_;
  Buffers buffers_;
  int32_t tokens_ = 0;  // maximum of the planned pass
  bool concurrent_ = false;
};

std::vector<gpu::KernelVariant> all_variants(const AttentionSetup& setup) {
  const auto found = find_group_variants(setup);
  if (!found) return portable_prefill().variants(setup);
  return {found->plan, found->attention};
}

size_t workspace_bytes(const AttentionSetup& setup, const BatchLimits& limits) {
  if (!find_parts(setup, false)) return portable_prefill().workspace_bytes(setup, limits);
  WorkspaceCarver counter(nullptr);
  carve(counter, setup, limits);
  return counter.bytes();
}

std::unique_ptr<AttentionKernel> load(const AttentionSetup& setup, gpu::KernelStore& store) {
  const auto found = find_group_variants(setup);
  if (!found) return portable_prefill().load(setup, store);
  return std::make_unique<HopperGroups>(setup, *found, store);
}

}  // namespace

const AttentionFamily& hopper_groups() {
  static constexpr AttentionFamily kFamily = {.folder = kFolder,
                                              .row_tile = kPartRows,
                                              .variants = all_variants,
                                              .workspace_bytes = workspace_bytes,
                                              .load = load};
  return kFamily;
}

}  // namespace fovea::kernels::cuda
