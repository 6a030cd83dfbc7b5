// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/sm90/common/prefill_setup.h"

#include <algorithm>
#include <set>
#include <string>

#include "kernels/cuda/family.h"

namespace fovea::kernels::cuda::prefill {
namespace {

// Pages of multiples of this many keys are copied in boxes, others are gathered row by row (chosen
// on H200, 2026-11-22).
constexpr int32_t kMinBox = 16;

// Returns whether the copy engine brings keys that are widened: rows of 128 bytes.
bool widens_boxes(const AttentionSetup& setup) {
  const auto& [head_dim, head_dim_v] = std::pair(setup.spec.head_dim, setup.spec.head_dim_v);
  return widens(setup) && setup.cache.page_size % kMinBox == 0 &&
         std::min(head_dim, head_dim_v) > 64 && std::max(head_dim, head_dim_v) <= 128;
}

}  // namespace

int32_t heads_shift(const AttentionSpec& spec) {
  int32_t shift = 0;
  for (int32_t group = spec.q_heads / spec.kv_heads; group % 2 == 0 && 1 << shift < kGroupRows;
       group /= 2) {
    ++shift;
  }
  return shift;
}

// The copy engine pads narrower heads with zeros.
std::optional<std::pair<int32_t, int32_t>> padded_dims(const AttentionSpec& spec) {
  std::set<std::pair<int32_t, int32_t>> fitting;
  const char* folder = is_fp8(spec.q_dtype) ? "sm90/prefill_fp8" : "sm90/prefill";
  for (const VariantValues& values : family(folder).baked) {
    const std::pair dims = {std::stoi(values[0]), std::stoi(values[1])};
    if (dims.first >= spec.head_dim && dims.second >= spec.head_dim_v) fitting.insert(dims);
  }
  return fitting.empty() ? std::nullopt : std::optional(*fitting.begin());
}

bool cached(const AttentionSpec& spec) { return !is_packed(spec.scope); }

DType stored(const AttentionSetup& setup) {
  return cached(setup.spec) ? setup.cache.dtype : setup.spec.q_dtype;
}

bool never_plain(const AttentionSpec& spec) {
  return spec.mask != MaskKind::none || spec.scores.logit_cap > 0 || spec.scores.has_alibi;
}

// Slopes of wider heads would spill.
const char* general_scores(const AttentionSpec& spec) {
  if (spec.scores.logit_cap > 0 || (spec.scores.has_alibi && padded_dims(spec)->first > 128))
    return "general";
  return spec.scores.has_alibi ? "sloped" : "masked";
}

bool widens(const AttentionSetup& setup) {
  return cached(setup.spec) && !is_fp8(setup.spec.q_dtype) && is_fp8(setup.cache.dtype);
}

bool uses_positions(const AttentionSpec& spec) { return spec.window > 0 || spec.chunk > 0; }

bool measures_positions(const AttentionSpec& spec) {
  return uses_positions(spec) || spec.scores.has_alibi || spec.mask == MaskKind::prefix_spans ||
         spec.mask == MaskKind::multi_item;
}

bool gathers(const AttentionSetup& setup) {
  if (!cached(setup.spec) || is_fp8(setup.spec.q_dtype) || widens_boxes(setup)) return false;
  return widens(setup) || setup.cache.page_size % kMinBox != 0;
}

bool sums_segments(const AttentionSetup& setup) {
  const AttentionSpec& spec = setup.spec;
  return spec.batch_invariant && !gathers(setup) && !widens(setup) && !is_fp8(spec.q_dtype) &&
         std::max(spec.head_dim, spec.head_dim_v) <= 128;
}

bool pairs_pass(const AttentionSetup& setup) {
  const AttentionSpec& spec = setup.spec;
  const int32_t head_dim = std::max(spec.head_dim, spec.head_dim_v);
  return spec.q_heads / spec.kv_heads % 2 == 1 && head_dim > 64 && head_dim <= 128 &&
         !spec.batch_invariant;
}

}  // namespace fovea::kernels::cuda::prefill
