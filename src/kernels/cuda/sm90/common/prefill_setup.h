// SPDX-License-Identifier: Apache-2.0
// Properties of a layer that decide which Hopper prefill kernels serve it: where its keys are, how
// they reach shared memory and how they are summed.
#pragma once

#include <utility>

#include "gpu/architectures.h"
#include "kernels/cuda/attention_kernel.h"

namespace fovea::kernels::cuda::prefill {

inline constexpr int32_t kGroupRows = 64;    // rows of a warpgroup
inline constexpr int32_t kColumnBlock = 64;  // columns of a box
using gpu::kHopper;
// Head dims whose last columns of K may lie elsewhere, one row for all heads.
inline constexpr std::pair<int32_t, int32_t> kLatentDims = {192, 128};

// Returns log2 of the q heads of a row tile: the largest power of two that divides the group, so
// that a tile's rows share keys and no row is wasted.
int32_t heads_shift(const AttentionSpec& spec);

// Returns the head dims of the smallest variant of sm90/prefill, or of sm90/prefill_fp8, that holds
// those of the layer; nothing if the layer's are too wide.
std::optional<std::pair<int32_t, int32_t>> padded_dims(const AttentionSpec& spec);

// Returns whether keys lie in a paged cache.
bool cached(const AttentionSpec& spec);
// Returns the dtype in which keys are stored.
DType stored(const AttentionSetup& setup);

// Returns whether one interval of keys per row and a softmax of scaled products cannot express the
// layer.
bool never_plain(const AttentionSpec& spec);
// Returns the value of the column `scores` for what a plain variant cannot express.
const char* general_scores(const AttentionSpec& spec);
// Returns whether windows and chunks are measured on positions, which some batches give.
bool uses_positions(const AttentionSpec& spec);
// Returns whether anything is measured on positions, ALiBi and some masks included.
bool measures_positions(const AttentionSpec& spec);

// Returns whether threads widen fp8 keys before the products.
bool widens(const AttentionSetup& setup);
// Returns whether threads gather the keys: from pages that boxes do not fit, and fp8 rows that the
// copy engine cannot bring. fp8 products have the copy engine only.
bool gathers(const AttentionSetup& setup);
// Returns whether rows are summed segment by segment. Wider heads leave no room in shared memory
// for a second sum, and gathering threads leave none for the warp that joins: their keys are summed
// in one go.
bool sums_segments(const AttentionSetup& setup);
// Returns whether a block of a pair may skip a key tile that only the rows of the other block see:
// with one q head a pair's row tile has twice the tokens of a key tile.
bool pairs_pass(const AttentionSetup& setup);

}  // namespace fovea::kernels::cuda::prefill
