// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <string>

#include "kernels/cuda/family.h"
#include "kernels/cuda/sm90/few_rows/few_rows.h"

namespace fovea::kernels::cuda::few_rows {
namespace {

constexpr std::string_view kFolder = "sm90/few_rows";

// A form of the kernel: blocks that share a segment, and segments that a cluster adds up itself.
struct Form {
  int32_t sharing, joined, max_segments;
};
constexpr Form kAlone = {1, 1, 0};
// From the one that takes the fewest batches.
constexpr std::array<Form, 3> kSharingForms = {Form{4, 1, 1}, Form{2, 4, 4}, Form{2, 1, 0}};

gpu::KernelVariant variant(const AttentionSetup& setup, const Form& form) {
  return make_variant(
      family(kFolder),
      {std::to_string(prefill::padded_dims(setup.spec)->first), *variant_type(setup.spec.q_dtype),
       std::to_string(form.sharing), std::to_string(form.joined)},
      setup.sm);
}

// Returns whether the family has sharing blocks for the layer: one of two dtypes and head dims.
bool shares(const AttentionSetup& setup) {
  return prefill::padded_dims(setup.spec)->first == 128 && setup.spec.q_dtype == DType::bf16;
}

}  // namespace

std::vector<gpu::KernelVariant> FewRows::variants(const AttentionSetup& setup) {
  std::vector<gpu::KernelVariant> all = {variant(setup, kAlone)};
  if (!shares(setup)) return all;
  for (const Form& form : kSharingForms) all.push_back(variant(setup, form));
  return all;
}

FewRows::FewRows(const AttentionSetup& setup, gpu::KernelStore& store)
    : multiprocessors_(setup.multiprocessors),
      alone_(setup, variant(setup, kAlone), prefill::kGroupRows, store) {
  if (!shares(setup)) return;
  for (const Form& form : kSharingForms) {
    const int32_t cluster = form.sharing * form.joined;
    const prefill::PrefillKernel& kernel =
        sharing_.emplace_back(setup, variant(setup, form), prefill::kGroupRows, store);
    const int32_t clusters =
        std::min(kernel.kernel().active_clusters(static_cast<uint32_t>(cluster)),
                 setup.multiprocessors / cluster);
    forms_.push_back({cluster, form.max_segments, clusters});
  }
}

prefill::Launch FewRows::choose(const hopper::BatchBounds& bounds, int32_t head_blocks) const {
  const auto form = hopper::choose_sharing(forms_, alone_.segment_keys(),
                                           bounds.all_requests * head_blocks, bounds);
  if (!form) return {&alone_, 1, multiprocessors_};
  const hopper::SharingForm& chosen = forms_[*form];
  return {&sharing_[*form], chosen.cluster, chosen.clusters * chosen.cluster};
}

}  // namespace fovea::kernels::cuda::few_rows
