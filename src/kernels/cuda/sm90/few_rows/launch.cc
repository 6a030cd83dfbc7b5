// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <string>

#include "kernels/cuda/family.h"
#include "kernels/cuda/sm90/few_rows/few_rows.h"

namespace fovea::kernels::cuda::few_rows {
namespace {

constexpr std::string_view kFolder = "sm90/few_rows";
// Pairs of blocks share segments of any length for up to so many row tiles (chosen on H200,
// 2026-11-22).
constexpr int32_t kMaxSharedTiles = 32;

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

// Requests of three segments, the last nearly whole, are slower in one cluster than in pairs
// (H200, 2026-11-23, not explained).
bool joins_slowly(int32_t keys, int32_t segment) {
  return 4 * int64_t{keys} > 11 * segment && keys <= 3 * segment;
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
  for (size_t i = 0; i < sharing_.size(); ++i) {
    const Form& form = kSharingForms[i];
    Sharing& sharing = sharing_[i];
    sharing.kernel.emplace(setup, variant(setup, form), prefill::kGroupRows, store);
    sharing.cluster = form.sharing * form.joined;
    sharing.max_segments = form.max_segments;
    sharing.clusters = std::min(sharing.kernel->kernel().active_clusters(sharing.cluster),
                                setup.multiprocessors / sharing.cluster);
  }
}

bool FewRows::serves(const Sharing& sharing, int32_t requests, int32_t tiles,
                     int32_t max_kv_len) const {
  if (!sharing.kernel || tiles > sharing.clusters) return false;
  const int32_t segment = sharing.kernel->segment_keys();
  const int64_t segments = (max_kv_len - 1) / segment + 1;
  if (sharing.max_segments > 0) {
    return requests == 1 && segments <= sharing.max_segments && !joins_slowly(max_kv_len, segment);
  }
  return tiles <= kMaxSharedTiles || tiles * segments <= sharing.clusters;
}

prefill::Launch FewRows::choose(int32_t requests, int32_t head_blocks, int32_t max_kv_len) const {
  for (const Sharing& sharing : sharing_) {
    if (!serves(sharing, requests, requests * head_blocks, max_kv_len)) continue;
    return {&*sharing.kernel, sharing.cluster, sharing.clusters * sharing.cluster};
  }
  return {&alone_, 1, multiprocessors_};
}

}  // namespace fovea::kernels::cuda::few_rows
