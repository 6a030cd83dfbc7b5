// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/sm90/prefill/variants.h"

#include <algorithm>
#include <string>

#include "kernels/cuda/family.h"
#include "kernels/cuda/sm90/few_rows/few_rows.h"
#include "kernels/cuda/sm90/prefill_fp8/variants.h"
#include "kernels/cuda/sm90/prefill_gather/variants.h"
#include "kernels/cuda/sm90/prefill_order/launch.h"

namespace fovea::kernels::cuda::prefill {
namespace {

VariantValues values_of(const AttentionSetup& setup, const char* loader, const char* scores,
                        const char* sums) {
  const auto dims = padded_dims(setup.spec);
  return {std::to_string(dims->first),
          std::to_string(dims->second),
          *variant_type(setup.spec.q_dtype),
          loader,
          scores,
          sums};
}

// Finds the kernels of this family, whose keys the copy engine brings as they are.
void find_box_variants(const AttentionSetup& setup, bool plain, bool general, Variants& found) {
  const AttentionSpec& spec = setup.spec;
  const auto dims = *padded_dims(spec);
  const auto variant = [&](const char* loader, const char* scores, const char* sums) {
    return make_variant(family(kFolder), values_of(setup, loader, scores, sums), setup.sm);
  };
  const bool segments = sums_segments(setup);
  const bool paired = dims.first >= 128 && dims.second % 128 == 0;
  const char* scores = general_scores(spec);
  const char* sums = segments ? "segments" : "whole";
  if (plain) found.plain = variant("pages", "plain", sums);
  if (general) found.general = variant("pages", scores, sums);
  if (plain && dims == kLatentDims && !spec.batch_invariant) {
    found.few_whole = variant("pages", "plain", "few_whole");
  }
  if (plain && segments) found.few_plain = variant("pages", "plain", "few_rows");
  if (general && segments) found.few_general = variant("pages", scores, "few_rows");
  if (plain && segments) found.few_rows = few_rows::FewRows::variants(setup);
  if (plain && paired) {
    found.pairs = variant(pairs_pass(setup) ? "passing" : "pairs", "plain", sums);
  }
  if (general && paired && dims.first % 128 == 0 && !segments) {
    found.general_pairs = variant("pairs", scores, sums);
  }
}

}  // namespace

std::optional<Variants> find_variants(const AttentionSetup& setup) {
  const AttentionSpec& spec = setup.spec;
  const auto dims = padded_dims(spec);
  if (setup.sm != kHopper || !variant_type(spec.q_dtype) || !variant_type(stored(setup)) || !dims) {
    return std::nullopt;
  }
  if (stored(setup) != spec.q_dtype && !widens(setup)) return std::nullopt;
  if (setup.shared_key_dims > 0 && !(*dims == kLatentDims && spec.head_dim == dims->first &&
                                     setup.shared_key_dims % kColumnBlock == 0)) {
    return std::nullopt;
  }
  const bool plain = !never_plain(spec);
  const bool general = never_plain(spec) || uses_positions(spec);
  Variants found{.order = prefill_order_variant(sums_segments(setup), setup.sm)};
  if (prefill_fp8::serves(setup)) {
    if (plain) found.plain = prefill_fp8::plain_variant(setup);
    if (general) found.general = prefill_fp8::general_variant(setup);
  } else if (prefill_gather::serves(setup)) {
    if (plain) found.plain = prefill_gather::plain_variant(setup);
    if (general) found.general = prefill_gather::general_variant(setup);
  } else {
    find_box_variants(setup, plain, general, found);
  }
  return found;
}

hopper::PrefillForms forms_of(const AttentionSetup& setup) {
  hopper::PrefillForms forms;
  forms.multiprocessors = setup.multiprocessors;
  forms.heads_shift = heads_shift(setup.spec);
  forms.sums_segments = sums_segments(setup);
  forms.pairs_pass = pairs_pass(setup);
  forms.latent_dims = setup.spec.head_dim > 128;
  return forms;
}

std::optional<gpu::KernelVariant> find_parts(const AttentionSetup& setup, bool few) {
  const AttentionSpec& spec = setup.spec;
  const bool fills_tiles = 1 << heads_shift(spec) == spec.q_heads / spec.kv_heads;
  const auto dims = padded_dims(spec);
  if (setup.sm != kHopper || !variant_type(spec.q_dtype) || !variant_type(stored(setup)) || !dims ||
      !fills_tiles || !(cached(spec) || *dims == kLatentDims) || is_fp8(spec.q_dtype) ||
      (stored(setup) != spec.q_dtype && !widens(setup)) || uses_positions(spec)) {
    return std::nullopt;
  }
  if (prefill_gather::serves(setup)) return prefill_gather::parts_variant(setup, few);
  const Family& own = family(kFolder);
  const char* scores = never_plain(spec) ? general_scores(spec) : "plain";
  const VariantValues values = values_of(setup, "pages", scores, few ? "few_parts" : "parts");
  // portable/attention serves the others, and is baked for them.
  if (std::ranges::find(own.baked, values) == own.baked.end()) return std::nullopt;
  return make_variant(own, values, setup.sm);
}

std::vector<gpu::KernelVariant> variants(const AttentionSetup& setup) {
  const auto found = find_variants(setup);
  if (!found) return {};
  std::vector<gpu::KernelVariant> list = {found->order};
  list.insert(list.end(), found->few_rows.begin(), found->few_rows.end());
  for (const auto& variant : {found->plain, found->general, found->few_plain, found->few_general,
                              found->few_whole, found->pairs, found->general_pairs}) {
    if (variant) list.push_back(*variant);
  }
  return list;
}

}  // namespace fovea::kernels::cuda::prefill
