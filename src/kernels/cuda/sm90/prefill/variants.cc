// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/sm90/prefill/variants.h"

#include <algorithm>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "kernels/cuda/family.h"

namespace fovea::kernels::cuda::prefill {
namespace {

constexpr std::string_view kOrderFolder = "sm90/prefill_order";
constexpr int kHopper = 90;

// Head dims of the variants, least work first; others are padded with zeros by the copy engine.
constexpr std::pair<int32_t, int32_t> kHeadDims[] = {
    {64, 64}, {128, 128}, {192, 128}, {192, 192}, {256, 256}};
// Of these the last columns of K may lie apart, one row for all heads.
constexpr std::pair<int32_t, int32_t> kSharesKeys = {192, 128};

// Pages of multiples of this many keys are copied in boxes, others gathered row by row: over pages
// of 16 boxes are 14 % faster at head dim 128, 23 % at 64, 5 % at 256; over pages of 8 5 % slower
// (H200, 2026-11-22).
constexpr int32_t kMinBox = 16;

// What one interval of keys per row and a softmax of scaled products cannot express.
bool never_plain(const AttentionSpec& spec) {
  return spec.mask != MaskKind::none || spec.logit_cap > 0 || spec.has_alibi;
}

// Whether threads widen fp8 keys on their way.
bool widens(const AttentionSetup& setup) {
  return cached(setup.spec) && !is_fp8(setup.spec.q_dtype) && is_fp8(setup.cache.dtype);
}
// Whether the copy engine brings keys that are widened: rows of 128 bytes.
bool widens_boxes(const AttentionSetup& setup) {
  const auto& [head_dim, head_dim_v] = std::pair(setup.spec.head_dim, setup.spec.head_dim_v);
  return widens(setup) && setup.cache.page_size % kMinBox == 0 &&
         std::min(head_dim, head_dim_v) > 64 && std::max(head_dim, head_dim_v) <= 128;
}

// Head dims of the smallest variant that holds those of the layer; none: they are too wide.
std::optional<std::pair<int32_t, int32_t>> padded_dims(const AttentionSpec& spec) {
  // 128-byte rows of fp8 products are 128 columns, and wider heads leave no registers.
  const std::span<const std::pair<int32_t, int32_t>> all = kHeadDims;
  const auto dims = is_fp8(spec.q_dtype) ? all.subspan(1, 1) : all;
  const auto found = std::ranges::find_if(dims, [&](const auto& pair) {
    return pair.first >= spec.head_dim && pair.second >= spec.head_dim_v;
  });
  return found == dims.end() ? std::nullopt : std::optional(*found);
}

// What is not plain. Slopes of wider heads spill.
const char* scores_of(const AttentionSpec& spec, int32_t head_dim) {
  if (spec.logit_cap > 0 || (spec.has_alibi && head_dim > 128)) return "general";
  return spec.has_alibi ? "sloped" : "masked";
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

int32_t heads_shift(const AttentionSpec& spec) {
  int32_t shift = 0;
  for (int32_t group = spec.q_heads / spec.kv_heads; group % 2 == 0 && 1 << shift < kGroupRows;
       group /= 2) {
    ++shift;
  }
  return shift;
}

bool cached(const AttentionSpec& spec) { return !is_packed(spec.scope); }

DType stored(const AttentionSetup& setup) {
  return cached(setup.spec) ? setup.cache.dtype : setup.spec.q_dtype;
}

bool uses_positions(const AttentionSpec& spec) { return spec.window > 0 || spec.chunk > 0; }

bool measures_positions(const AttentionSpec& spec) {
  return uses_positions(spec) || spec.has_alibi || spec.mask == MaskKind::prefix_spans ||
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

std::optional<Variants> find_variants(const AttentionSetup& setup) {
  const AttentionSpec& spec = setup.spec;
  const auto q = variant_type(spec.q_dtype);
  const auto kv = variant_type(stored(setup));
  const auto dims = padded_dims(spec);
  if (setup.sm != kHopper || !q || !kv || !dims ||
      (stored(setup) != spec.q_dtype && !is_fp8(stored(setup)))) {
    return std::nullopt;
  }
  if (setup.shared_key_dims > 0 && !(*dims == kSharesKeys && spec.head_dim == dims->first &&
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
  Variants found{
      .order = make_variant(family(kOrderFolder), {"256", segments ? "cut" : "whole"}, setup.sm)};
  const char* loader = loader_of(setup);
  if (plain) {
    // Exponents may give a row other bits in another batch.
    const bool exponents = is_fp8(spec.q_dtype) && !spec.batch_invariant;
    found.plain =
        variant(gathers_tokens(setup) ? "tokens" : loader, exponents ? "exponents" : "plain", sums);
  }
  if (general) found.general = variant(loader, scores, sums);
  if (plain && paired && *dims == kSharesKeys && !spec.batch_invariant) {
    found.few_whole = variant(loader, "plain", "few_whole");
  }
  if (plain && segments) found.few_plain = variant(loader, "plain", "few_rows");
  if (general && segments) found.few_general = variant(loader, scores, "few_rows");
  if (plain && segments) found.eight_plain = variant(loader, "plain", "eight_rows");
  if (plain && segments && dims->first == 128 && spec.q_dtype == DType::bf16) {
    found.eight_shared = variant(loader, "plain", "eight_shared");
    found.eight_joined = variant(loader, "plain", "eight_joined");
    found.eight_quarters = variant(loader, "plain", "eight_quarters");
  }
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
      !(cached(spec) || *dims == kSharesKeys) || is_fp8(spec.q_dtype) ||
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
  for (const auto& variant :
       {found->plain, found->general, found->few_plain, found->few_general, found->few_whole,
        found->eight_plain, found->eight_shared, found->eight_joined, found->eight_quarters,
        found->pairs, found->general_pairs}) {
    if (variant) list.push_back(*variant);
  }
  return list;
}

}  // namespace fovea::kernels::cuda::prefill
