// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/sm90/prefill_fp8/variants.h"

#include <string>

#include "kernels/cuda/family.h"

namespace fovea::kernels::cuda::prefill_fp8 {
namespace {

constexpr std::string_view kFolder = "sm90/prefill_fp8";

gpu::KernelVariant variant(const AttentionSetup& setup, const char* scores) {
  const auto dims = prefill::padded_dims(setup.spec);
  return make_variant(family(kFolder),
                      {std::to_string(dims->first), std::to_string(dims->second),
                       *variant_type(setup.spec.q_dtype), scores},
                      setup.sm);
}

}  // namespace

bool serves(const AttentionSetup& setup) {
  return is_fp8(setup.spec.q_dtype) && prefill::stored(setup) == setup.spec.q_dtype &&
         prefill::padded_dims(setup.spec);
}

// Exponents may give a row other bits in another batch.
gpu::KernelVariant plain_variant(const AttentionSetup& setup) {
  return variant(setup, setup.spec.batch_invariant ? "plain" : "exponents");
}

gpu::KernelVariant general_variant(const AttentionSetup& setup) {
  return variant(setup, prefill::general_scores(setup.spec));
}

}  // namespace fovea::kernels::cuda::prefill_fp8
