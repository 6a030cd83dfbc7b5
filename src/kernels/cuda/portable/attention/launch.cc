// SPDX-License-Identifier: Apache-2.0
// Three launches over one work list: plan, attention, merge. The kernel makes two families: decode
// has tiles of 16 rows, prefill larger ones.
#include "kernels/cuda/portable/merge/launch.h"

#include "core/check.h"
#include "kernels/cuda/attention_kernel.h"
#include "kernels/cuda/family.h"
#include "kernels/cuda/portable/plan/launch.h"

namespace fovea::kernels::cuda {
namespace {

constexpr std::string_view kFolder = "portable/attention";
// Shared memory and registers leave room for two CTAs per SM.
constexpr int32_t kBlocksPerSm = 2;
constexpr int32_t kMaxHeadDim = 256;
constexpr int32_t kDecodeRows = 16;

// The registers of a warp hold sums of 32 rows up to 128 columns.
template <bool kDecode>
int32_t row_tile(const AttentionSpec& spec) {
  return kDecode ? kDecodeRows : spec.head_dim_v <= 128 ? 128 : 64;
}

struct Variants {
  gpu::KernelVariant plan, attention, merge;
};

template <bool kDecode>
std::optional<Variants> find_variants(const AttentionSetup& setup) {
  const AttentionSpec& spec = setup.spec;
  const auto q = variant_type(spec.q_dtype);
  const bool cached = !is_packed(spec.scope);
  const DType stored = cached ? setup.cache.dtype : spec.q_dtype;
  const auto kv = variant_type(stored);
  const auto out = variant_type(activation_dtype(spec));
  const bool types = q && kv && out && (stored == spec.q_dtype || is_fp8(stored));
  if (!types || setup.shared_key_dims > 0 ||
      std::max(spec.head_dim, spec.head_dim_v) > kMaxHeadDim) {
    return std::nullopt;
  }
  const std::string tile = std::to_string(row_tile<kDecode>(spec));
  const auto values = fitting_values(kFolder, spec.head_dim, spec.head_dim_v, {*q, *kv, tile});
  return Variants{plan_variant(row_tile<kDecode>(spec), setup.sm),
                  make_variant(family(kFolder), values, setup.sm),
                  merge_variant(row_tile<kDecode>(spec), activation_dtype(spec), setup.sm)};
}

template <bool kDecode>
std::vector<gpu::KernelVariant> variants(const AttentionSetup& setup) {
  const auto found = find_variants<kDecode>(setup);
  if (!found) return {};
  return {found->plan, found->attention, found->merge};
}

WorkList carve(WorkspaceCarver& workspace, const AttentionSetup& setup, const BatchLimits& limits,
               int32_t row_tile) {
  return carve_work_list(workspace, setup, limits, {row_tile, row_tile},
                         setup.multiprocessors * kBlocksPerSm);
}

template <bool kDecode>
size_t workspace_bytes(const AttentionSetup& setup, const BatchLimits& limits) {
  WorkspaceCarver counter(nullptr);
  carve(counter, setup, limits, row_tile<kDecode>(setup.spec));
  return counter.bytes();
}

class PortableAttention final : public AttentionKernel {
 public:
  PortableAttention(const AttentionSetup& setup, const Variants& variants, int32_t row_tile,
                    gpu::KernelStore& store)
      : setup_(setup),
        row_tile_(row_tile),
        plan_(variants.plan, store),
        attention_(variants.attention, store),
        merge_(variants.merge, store) {
    check_argument(attention_.row_tile() == row_tile, "{} has row tiles of {}, its plan {}",
                   variants.attention.name, attention_.row_tile(), row_tile);
  }

  void reserve(const BatchLimits& limits, std::byte* workspace) override {
    WorkspaceCarver carver(workspace);
    work_ = carve(carver, setup_, limits, row_tile_);
  }

  void plan(const PlanRequest& request, PlanQueue& plans) override {
    const PlanParams plan{request.batch, work_, setup_.spec.batch_invariant};
    if (request.role == PassRole::groups) {
      plans.add_groups(plan_, plan);
    } else {
      plans.add(plan_, plan);
    }
  }

  void attend(const AttentionParams& given, int32_t, gpu::Launcher launcher) override {
    AttentionParams params = given;
    params.work = work_;
    attention_.launch({static_cast<uint32_t>(work_.ctas)}, params, launcher);
    merge_.run(params, launcher);
  }

 private:
  AttentionSetup setup_;
  int32_t row_tile_;
  Kernel plan_, attention_;
  Merge merge_;
  WorkList work_{};
};

template <bool kDecode>
std::unique_ptr<AttentionKernel> load(const AttentionSetup& setup, gpu::KernelStore& store) {
  const auto found = find_variants<kDecode>(setup);
  check_argument(found.has_value(), "{} has no variant for these layers", kFolder);
  return std::make_unique<PortableAttention>(setup, *found, row_tile<kDecode>(setup.spec), store);
}

template <bool kDecode>
constexpr AttentionFamily family_of(int32_t max_rows) {
  return {.folder = kFolder,
          .row_tile = max_rows,
          .variants = variants<kDecode>,
          .workspace_bytes = workspace_bytes<kDecode>,
          .load = load<kDecode>};
}

}  // namespace

const AttentionFamily& portable_prefill() {
  static constexpr AttentionFamily kFamily = family_of<false>(128);
  return kFamily;
}

const AttentionFamily& portable_decode() {
  static constexpr AttentionFamily kFamily = family_of<true>(kDecodeRows);
  return kFamily;
}

}  // namespace fovea::kernels::cuda
