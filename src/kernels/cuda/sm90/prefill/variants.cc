// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/sm90/prefill/variants.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "kernels/cuda/family.h"
#include "kernels/cuda/sm90/few_rows/few_rows.h"
#include "kernels/cuda/sm90/prefill_order/launch.h"

namespace fovea::kernels::cuda::prefill {
namespace {

// What is not plain. Slopes of wider heads spill.
const char* scores_of(const AttentionSpec& spec, int32_t head_dim) {
  if (spec.scores.logit_cap > 0 || (spec.scores.has_alibi && head_dim > 128)) return "general";
  return spec.scores.has_alibi ? "sloped" : "masked";
}

// Whether rows that threads gather lie in pages of their own.
bool gathers_tokens(const AttentionSetup& setup) {
  return gathers(setup) && !widens(setup) && setup.cache.page_size == 1;
}

// Of single blocks.
const char* loader_of(const AttentionSetup& setup) {
  return gathers(setup) ? "rows" : widens(setup) ? "boxes" : "pages";
}

}  // namespace

std::optional<Variants> find_variants(const AttentionSetup& setup) {
  const AttentionSpec& spec = setup.spec;
  const auto q = variant_type(spec.q_dtype);
  const auto kv = variant_type(stored(setup));
  const auto dims = padded_dims(spec);
  if (setup.sm != kHopper || !q || !kv || !dims ||
      (stored(setup) != spec.q_dtype && !is_fp8(stored(setup)))) {
    return std::nullopt;
  }
  if (setup.shared_key_dims > 0 && !(*dims == kLatentDims && spec.head_dim == dims->first &&
                                     setup.shared_key_dims % kColumnBlock == 0)) {
    return std::nullopt;
  }
  const auto variant = [&](const char* loader, const char* scores, const char* sums) {
    return make_variant(
        family(kFolder),
        {std::to_string(dims->first), std::to_string(dims->second), *q, *kv, loader, scores, sums},
        setup.sm);
  };
  const bool plain = !never_plain(spec);
  const bool general = never_plain(spec) || uses_positions(spec);
  const bool segments = sums_segments(setup);
  const bool paired = dims->first >= 128 && dims->second % 128 == 0 && !gathers(setup) &&
                      !widens(setup) && !is_fp8(spec.q_dtype);
  const char* scores = scores_of(spec, dims->first);
  const char* sums = segments ? "segments" : "whole";
  Variants found{.order = prefill_order_variant(segments, setup.sm)};
  const char* loader = loader_of(setup);
  if (plain) {
    // Exponents may give a row other bits in another batch.
    const bool exponents = is_fp8(spec.q_dtype) && !spec.batch_invariant;
    found.plain =
        variant(gathers_tokens(setup) ? "tokens" : loader, exponents ? "exponents" : "plain", sums);
  }
  if (general) found.general = variant(loader, scores, sums);
  if (plain && paired && *dims == kLatentDims && !spec.batch_invariant) {
    found.few_whole = variant(loader, "plain", "few_whole");
  }
  if (plain && segments) found.few_plain = variant(loader, "plain", "few_rows");
  if (general && segments) found.few_general = variant(loader, scores, "few_rows");
  if (plain && segments) found.few_rows = few_rows::FewRows::variants(setup);
  if (plain && paired) {
    found.pairs = variant(pairs_pass(setup) ? "passing" : "pairs", "plain", sums);
  }
  if (general && paired && dims->first % 128 == 0 && !segments) {
    found.general_pairs = variant("pairs", scores, sums);
  }
  return found;
}

std::optional<gpu::KernelVariant> find_parts(const AttentionSetup& setup, const char* sums) {
  const AttentionSpec& spec = setup.spec;
  const bool fills_tiles = 1 << heads_shift(spec) == spec.q_heads / spec.kv_heads;
  const auto q = variant_type(spec.q_dtype);
  const auto kv = variant_type(stored(setup));
  const auto dims = padded_dims(spec);
  if (setup.sm != kHopper || !q || !kv || !dims || !fills_tiles ||
      !(cached(spec) || *dims == kLatentDims) || is_fp8(spec.q_dtype) ||
      (stored(setup) != spec.q_dtype && !widens(setup)) || uses_positions(spec)) {
    return std::nullopt;
  }
  const Family& prefill = family(kFolder);
  const VariantValues values = {std::to_string(dims->first),
                                std::to_string(dims->second),
                                *q,
                                *kv,
                                loader_of(setup),
                                never_plain(spec) ? scores_of(spec, dims->first) : "plain",
                                sums};
  // Others are portable/attention's, which is baked for them.
  if (std::ranges::find(prefill.baked, values) == prefill.baked.end()) return std::nullopt;
  return make_variant(prefill, values, setup.sm);
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
