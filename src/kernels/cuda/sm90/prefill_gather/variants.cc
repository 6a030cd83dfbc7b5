// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/sm90/prefill_gather/variants.h"

#include <algorithm>
#include <string>

#include "kernels/cuda/family.h"

namespace fovea::kernels::cuda::prefill_gather {
namespace {

constexpr std::string_view kFolder = "sm90/prefill_gather";

// Returns the loader of all kernels but the plain one.
const char* loader_of(const AttentionSetup& setup) {
  return prefill::gathers(setup) ? "rows" : "boxes";
}

VariantValues values_of(const AttentionSetup& setup, const char* loader, const char* scores,
                        const char* sums) {
  const auto dims = prefill::padded_dims(setup.spec);
  return {std::to_string(dims->first),
          std::to_string(dims->second),
          *variant_type(setup.spec.q_dtype),
          *variant_type(prefill::stored(setup)),
          loader,
          scores,
          sums};
}

}  // namespace

bool serves(const AttentionSetup& setup) {
  return prefill::gathers(setup) || prefill::widens(setup);
}

gpu::KernelVariant plain_variant(const AttentionSetup& setup) {
  const bool tokens =
      prefill::gathers(setup) && !prefill::widens(setup) && setup.cache.page_size == 1;
  const char* loader = tokens ? "tokens" : loader_of(setup);
  return make_variant(family(kFolder), values_of(setup, loader, "plain", "whole"), setup.sm);
}

gpu::KernelVariant general_variant(const AttentionSetup& setup) {
  const char* scores = prefill::general_scores(setup.spec);
  return make_variant(family(kFolder), values_of(setup, loader_of(setup), scores, "whole"),
                      setup.sm);
}

std::optional<gpu::KernelVariant> parts_variant(const AttentionSetup& setup, bool few) {
  const AttentionSpec& spec = setup.spec;
  const char* scores = prefill::never_plain(spec) ? prefill::general_scores(spec) : "plain";
  const Family& own = family(kFolder);
  const VariantValues values =
      values_of(setup, loader_of(setup), scores, few ? "few_parts" : "parts");
  if (std::ranges::find(own.baked, values) == own.baked.end()) return std::nullopt;
  return make_variant(own, values, setup.sm);
}

}  // namespace fovea::kernels::cuda::prefill_gather
