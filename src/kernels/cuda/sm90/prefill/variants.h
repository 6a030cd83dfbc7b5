// SPDX-License-Identifier: Apache-2.0
// Which variants of Hopper prefill serve a layer.
#pragma once

#include <optional>
#include <string_view>
#include <vector>

#include "kernels/cuda/attention_kernel.h"

namespace fovea::kernels::cuda::prefill {

constexpr std::string_view kFolder = "sm90/prefill";
inline constexpr int32_t kGroupRows = 64;    // of a warpgroup
inline constexpr int32_t kColumnBlock = 64;  // of a box

// q heads of a tile, as a power of two: the largest that divides the group, so that a tile's rows
// share keys and no row is wasted.
int32_t heads_shift(const AttentionSpec& spec);

struct Variants {
  gpu::KernelVariant order;
  // general: for what plain cannot express, of masked or general scores.
  std::optional<gpu::KernelVariant> plain, general;
  // Of the same bits, for requests with few rows; where segments are summed.
  std::optional<gpu::KernelVariant> few_plain, few_general;
  // For few row tiles, of heads of 192/128.
  std::optional<gpu::KernelVariant> few_whole;
  // For requests with up to eight rows; shared: and few row tiles; quarters, joined: a single
  // request of one or of up to four segments.
  std::optional<gpu::KernelVariant> eight_plain, eight_shared, eight_joined, eight_quarters;
  std::optional<gpu::KernelVariant> pairs, general_pairs;  // as plain and general
};

// None: no variant does.
std::optional<Variants> find_variants(const AttentionSetup& setup);
// All of them.
std::vector<gpu::KernelVariant> variants(const AttentionSetup& setup);

// What attends to parts of the keys of row tiles, `sums` "parts" or "few_parts"; none: no baked
// variant does. Of groups of q heads whose rows fill tiles as those of portable/plan do.
std::optional<gpu::KernelVariant> find_parts(const AttentionSetup& setup, const char* sums);

// Whether keys lie in a paged cache, and as what they are stored.
bool cached(const AttentionSpec& spec);
DType stored(const AttentionSetup& setup);
// Windows and chunks are measured on positions, which some batches give.
bool uses_positions(const AttentionSpec& spec);
// So are ALiBi and some masks. Others have no use for them.
bool measures_positions(const AttentionSpec& spec);
// Whether threads gather the keys: from other pages, and where other rows are widened. fp8 products
// have the copy engine only.
bool gathers(const AttentionSetup& setup);
// Whether rows are summed segment by segment. Wider heads leave no room in shared memory for a
// second sum, rows that threads gather none for the warps that join: their keys are summed in one
// go.
bool sums_segments(const AttentionSetup& setup);
// Whether key tiles that only the rows of one block of a pair see pass the other by: a pair has
// rows of one q head there, so twice the tokens of a key tile.
bool pairs_pass(const AttentionSetup& setup);

}  // namespace fovea::kernels::cuda::prefill
