// SPDX-License-Identifier: Apache-2.0
// Says for explain() how the prompts of a layer are computed.
#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "kernels/cuda/kernel_traits.h"
#include "kernels/cuda/sm90/prefill/split_keys.h"
#include "kernels/cuda/store.h"

namespace fovea::kernels::cuda {
namespace {

using namespace prefill;

// Returns the forms with the key tiles of compiled kernels; nothing if one is not compiled yet.
std::optional<hopper::PrefillForms> compiled_forms(const AttentionSetup& setup) {
  using enum hopper::PrefillForm;
  const auto found = find_variants(setup);
  if (!found) return std::nullopt;
  hopper::PrefillForms forms = forms_of(setup);
  for (const auto& [form, variant] :
       {std::pair(plain, &found->plain), std::pair(general, &found->general),
        std::pair(few_whole, &found->few_whole), std::pair(pairs, &found->pairs),
        std::pair(general_pairs, &found->general_pairs)}) {
    if (!*variant) continue;
    const auto kernel = kernel_store().find(**variant);
    const auto traits = kernel ? read_traits(kernel->cubin, (*variant)->name) : std::nullopt;
    if (!traits) return std::nullopt;
    forms.key_tiles[static_cast<size_t>(form)] = traits->key_tile;
  }
  return forms;
}

}  // namespace

std::string describe_hopper_prefill(const AttentionSetup& setup, const BatchLimits& limits) {
  const auto forms = compiled_forms(setup);
  if (!forms) return {};
  const int32_t tokens = std::min(limits.max_q_len, limits.max_tokens);
  std::string text;
  for (const int32_t keys : std::set{tokens, std::max(tokens, limits.max_kv_len)}) {
    const hopper::BatchBounds bounds = {.requests = 1,
                                        .all_requests = 1,
                                        .tokens = tokens,
                                        .q_len = tokens,
                                        .kv_len = keys,
                                        .q_heads = setup.spec.q_heads,
                                        .kv_heads = setup.spec.kv_heads};
    const auto split = SplitKeys::row_tile(setup, bounds);
    text += fmt::format("{}{} new tokens of {} keys: {}", text.empty() ? "" : ", ", tokens, keys,
                        split ? fmt::format("keys split over blocks, row tiles of {}", *split)
                              : describe(hopper::choose_prefill(*forms, bounds, true)));
  }
  return text;
}

}  // namespace fovea::kernels::cuda
