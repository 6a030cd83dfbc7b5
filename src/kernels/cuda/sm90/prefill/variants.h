// SPDX-License-Identifier: Apache-2.0
// Which variants of Hopper prefill serve a layer.
#pragma once

#include <optional>
#include <string_view>
#include <vector>

#include "kernels/cuda/sm90/choose.h"
#include "kernels/cuda/sm90/common/prefill_setup.h"

namespace fovea::kernels::cuda::prefill {

inline constexpr std::string_view kFolder = "sm90/prefill";

struct Variants {
  gpu::KernelVariant order;
  std::optional<gpu::KernelVariant> plain;
  std::optional<gpu::KernelVariant> general;  // for what plain cannot express
  // For requests with up to 64 rows where segments are summed: the bits of plain and general.
  std::optional<gpu::KernelVariant> few_plain, few_general;
  // For few row tiles, of heads of 192/128.
  std::optional<gpu::KernelVariant> few_whole;
  std::vector<gpu::KernelVariant> few_rows;  // kernels of sm90/few_rows
  // The same as plain and general, by pairs of blocks.
  std::optional<gpu::KernelVariant> pairs, general_pairs;
};

// Returns nothing if no variant serves the layer.
std::optional<Variants> find_variants(const AttentionSetup& setup);
// Returns all of them.
std::vector<gpu::KernelVariant> variants(const AttentionSetup& setup);

// Returns what the choice of a form needs to know of the layer. It has no kernels yet.
hopper::PrefillForms forms_of(const AttentionSetup& setup);

// Returns the baked variant that attends to parts of the keys of row tiles of 128 rows, or of 64
// (`few`), if there is one. The layer's groups of q heads fill row tiles as those of portable/plan
// do.
std::optional<gpu::KernelVariant> find_parts(const AttentionSetup& setup, bool few);

}  // namespace fovea::kernels::cuda::prefill
