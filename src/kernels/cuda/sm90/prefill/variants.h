// SPDX-License-Identifier: Apache-2.0
// Which variants of Hopper prefill serve a layer.
#pragma once

#include <optional>
#include <string_view>
#include <vector>

#include "kernels/cuda/sm90/common/prefill_setup.h"

namespace fovea::kernels::cuda::prefill {

constexpr std::string_view kFolder = "sm90/prefill";
struct Variants {
  gpu::KernelVariant order;
  // general: for what plain cannot express, of masked or general scores.
  std::optional<gpu::KernelVariant> plain, general;
  // Of the same bits, for requests with few rows; where segments are summed.
  std::optional<gpu::KernelVariant> few_plain, few_general;
  // For few row tiles, of heads of 192/128.
  std::optional<gpu::KernelVariant> few_whole;
  std::vector<gpu::KernelVariant> few_rows;                // those of sm90/few_rows
  std::optional<gpu::KernelVariant> pairs, general_pairs;  // as plain and general
};

// None: no variant does.
std::optional<Variants> find_variants(const AttentionSetup& setup);
// All of them.
std::vector<gpu::KernelVariant> variants(const AttentionSetup& setup);

// What attends to parts of the keys of row tiles, `sums` "parts" or "few_parts"; none: no baked
// variant does. Of groups of q heads whose rows fill tiles as those of portable/plan do.
std::optional<gpu::KernelVariant> find_parts(const AttentionSetup& setup, const char* sums);

}  // namespace fovea::kernels::cuda::prefill
