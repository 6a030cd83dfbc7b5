// SPDX-License-Identifier: Apache-2.0
// Attention to keys that many requests share: the plan and the merge of portable/attention around
// warpgroup products. What these do not serve is portable/attention's.
#include "kernels/cuda/family.h"
#include "kernels/cuda/sm90/prefill/loaded.h"

namespace fovea::kernels::cuda {
namespace {

using namespace prefill;

constexpr int32_t kRowTile = 128;

struct GroupVariants {
  gpu::KernelVariant plan, attention, merge;
};

std::optional<GroupVariants> find_group_variants(const AttentionSetup& setup) {
  const auto parts = find_parts(setup);
  if (!parts) return std::nullopt;
  const std::string tile = std::to_string(kRowTile);
  return GroupVariants{
      make_variant(family("portable/plan"), {tile}, setup.sm), *parts,
      make_variant(family("portable/merge"), {tile, *variant_type(setup.spec.q_dtype)}, setup.sm)};
}

WorkList carve(WorkspaceCarver& workspace, const AttentionSetup& setup, const BatchLimits& limits) {
  return carve_work_list(workspace, setup, limits, kRowTile, setup.multiprocessors);
}

class HopperGroups final : public AttentionKernel {
 public:
  HopperGroups(const AttentionSetup& setup, const GroupVariants& variants, gpu::KernelStore& store)
      : setup_(setup),
        plan_(variants.plan, store),
        attention_(setup, variants.attention, kRowTile, store),
        merge_(variants.merge, store) {}

  void reserve(const BatchLimits& limits, std::byte* workspace) override {
    WorkspaceCarver carver(workspace);
    work_ = carve(carver, setup_, limits);
  }

  void expect_tokens(int32_t tokens) override { tokens_ = tokens; }

  void plan(const BatchParams& batch, int32_t, const PlanCompany& company, Stream stream) override {
    launch_plan(plan_, plan_blocks(company), PlanParams{batch, work_, 0}, company, stream);
  }

  // Results are f32: given.f32_out.
  void attend(const AttentionParams& given, int32_t layer, Stream stream) override {
    const AttentionSpec& spec = setup_.spec;
    PrefillParams params{};
    gpu::encode_tensor_map(row_map(spec, tokens_, given.q, spec.q_dtype, spec.head_dim,
                                   given.q_head_stride, given.q_token_stride),
                           &params.q);
    if (!gathers(setup_)) {  // else rows are found through given.keys
      params.k = attention_.k(layer);
      params.v = attention_.v(layer);
    }
    params.attention = given;
    params.attention.work = work_;
    params.heads_shift = heads_shift(spec);
    params.box_keys = attention_.box_keys();
    const auto ctas = static_cast<uint32_t>(work_.ctas);
    attention_.kernel().launch_overlapped({ctas}, params, stream);
    const MergeParams merge{given.batch,           work_,     given.out,   given.out_token_stride,
                            given.out_head_stride, given.lse, given.sinks, given.head_dim_v,
                            given.f32_out};
    merge_.launch_overlapped({ctas, kRowTile / kMergedRows}, merge, stream);
  }

 private:
  AttentionSetup setup_;
  Kernel plan_;
  Prefill attention_;
  Kernel merge_;
  WorkList work_{};
  int32_t tokens_ = 0;  // of the planned pass at most
};

std::vector<gpu::KernelVariant> all_variants(const AttentionSetup& setup) {
  const auto found = find_group_variants(setup);
  if (!found) return portable_prefill().variants(setup);
  return {found->plan, found->attention, found->merge};
}

size_t workspace_bytes(const AttentionSetup& setup, const BatchLimits& limits) {
  if (!find_parts(setup)) return portable_prefill().workspace_bytes(setup, limits);
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
                                              .row_tile = kRowTile,
                                              .variants = all_variants,
                                              .workspace_bytes = workspace_bytes,
                                              .load = load};
  return kFamily;
}

}  // namespace fovea::kernels::cuda
