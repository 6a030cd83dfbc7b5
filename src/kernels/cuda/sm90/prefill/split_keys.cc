// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/sm90/prefill/split_keys.h"

#include <algorithm>

#include "core/rounding.h"
#include "kernels/cuda/family.h"

namespace fovea::kernels::cuda::prefill {
namespace {

// Keys of a row tile that take as long as the list, the partial results and the merge: 8 x 16 over
// 4k, 2816 by this count, takes 53 us instead of 54, 1 x 16 over 16k 35 instead of 166 (H200,
// 2026-11-23).
constexpr float kLeastIdleKeys = 2048;
// Of packed keys, which are not waited for: 16 heads, 1 x 256 in 2048, 1527 by this count, takes 44
// us with its projections instead of 66 (H200, 2026-11-28).
constexpr float kLeastIdlePackedKeys = 1024;

// Packed rows of a request up to which sm90/decode is faster. Its tiles of 16 rows take long to
// join where lengths differ or leave multiprocessors idle, and more rows read their keys twice. 8 x
// 4 and 8 x 8 over 512, 16 and 32 rows: 15.5 and 15.2 us here, decode 12.1 and 13.7; over 128 to
// 896 15.2 and 15.3 of 30.5 and 37.0; fp8 24 x 1 over 2048 65.7 of 36.7 (H200, 2026-11-24).
constexpr int32_t kMostDecodeRows = 8;
constexpr int32_t kMostDecodeRowsFp8 = 16;

struct FormVariants {
  int32_t rows;
  float over_whole;
  gpu::KernelVariant plan, merge, parts;
};

std::vector<FormVariants> find_forms(const AttentionSetup& setup) {
  std::vector<FormVariants> forms;
  if (setup.spec.batch_invariant) return forms;
  const auto add = [&](int32_t rows, float over_whole, const char* sums) {
    const auto parts = find_parts(setup, sums);
    if (!parts) return;
    const std::string tile = std::to_string(rows);
    forms.push_back({rows, over_whole, make_variant(family("portable/plan"), {tile}, setup.sm),
                     merge_variant(rows, activation_dtype(setup.spec), setup.sm), *parts});
  };
  // Half of the rows of a whole tile would be nobody's, and fewer keys on their way.
  add(kFewPartRows, 0.65f, "few_parts");
  // In parts no pairs of blocks share keys.
  add(kPartRows, 1.05f, "parts");
  return forms;
}

}  // namespace

void Parts::attend(const AttentionParams& given, int32_t tokens, bool beside, bool list_settled,
                   int32_t layer, Stream stream) {
  const AttentionSpec& spec = setup_.spec;
  PrefillParams params{};
  params.attention = given;
  params.heads_shift = heads_shift(spec);
  q_map_.encode(row_map(given.batch.q_heads, params.heads_shift, tokens, given.q, spec.q_dtype,
                        spec.head_dim, given.q_head_stride, given.q_token_stride),
                &params.q);
  params.box_keys = kernel_.box_keys();
  if (gathers(setup_)) {
    // Rows are found through given.keys.
  } else if (cached(spec)) {
    params.k = kernel_.k(layer);
    params.v = kernel_.v(layer);
  } else {
    packed_.encode(setup_, shared_keys_, tokens, params);
  }
  params.beside = beside;
  params.list_settled = list_settled;
  kernel_.kernel().launch_overlapped({static_cast<uint32_t>(given.work.ctas)}, params, stream);
}

std::vector<gpu::KernelVariant> SplitKeys::variants(const AttentionSetup& setup) {
  std::vector<gpu::KernelVariant> all;
  for (const FormVariants& form : find_forms(setup)) {
    all.insert(all.end(), {form.plan, form.merge, form.parts});
  }
  return all;
}

// One plan is valid at a time, so the forms share their bytes.
WorkList SplitKeys::carve(WorkspaceCarver& workspace, const AttentionSetup& setup,
                          const BatchLimits& limits) {
  return carve_work_list(workspace, setup, limits, {.least = kFewPartRows, .most = kPartRows},
                         setup.multiprocessors);
}

SplitKeys::SplitKeys(const AttentionSetup& setup, gpu::KernelStore& store)
    : packed_(!cached(setup.spec)),
      most_decode_rows_(dtype_bytes(stored(setup)) == 1 ? kMostDecodeRowsFp8 : kMostDecodeRows),
      blocks_(setup.multiprocessors) {
  for (const FormVariants& form : find_forms(setup)) {
    forms_.push_back({form.rows, form.over_whole, Kernel(form.plan, store),
                      Merge(form.merge, store), Parts(setup, form.parts, form.rows, store)});
  }
}

bool SplitKeys::outruns_decode(const BatchParams& batch) const {
  const int64_t rows = int64_t{longest(batch)} * (batch.q_heads / batch.kv_heads);
  return !packed_ && forms_.front().rows == kFewPartRows && rows > most_decode_rows_ &&
         rows <= hopper_decode().row_tile;
}

// Not by the tokens: they may be fewer in a captured pass, whose bits are those of an eager one.
bool SplitKeys::plan(const BatchParams& batch, int32_t tokens, int32_t requests, int32_t keys,
                     PassPlan& pass) {
  const int64_t group = batch.q_heads / batch.kv_heads;
  if (batch.kv_lens == nullptr) keys = std::min(keys, longest(batch));
  active_ = nullptr;
  beside_ = batch.max_planned_q_len > 0;
  list_settled_ = false;
  for (Form& form : forms_) {
    const int64_t tiles_of_longest = ceil_div(int64_t{longest(batch)} * group, int64_t{form.rows});
    if (tiles_of_longest > 1 && &form != &forms_.back()) continue;
    const int64_t tiles = batch.kv_heads * requests * tiles_of_longest;
    const auto turns = static_cast<float>(ceil_div(tiles, int64_t{blocks_}));
    const float share = static_cast<float>(tiles) / static_cast<float>(blocks_);
    const float idle_keys = (turns - form.over_whole * share) * static_cast<float>(keys);
    if (idle_keys <= (packed_ ? kLeastIdlePackedKeys : kLeastIdleKeys) && !outruns_decode(batch))
      return false;
    active_ = &form;
    tokens_ = tokens;
    pass.add(form.plan, PlanParams{batch, work_, 0});
    return true;
  }
  return false;
}

void SplitKeys::attend(const AttentionParams& given, int32_t layer, Stream stream) {
  AttentionParams params = given;
  params.work = work_;
  active_->parts.attend(params, tokens_, beside_, list_settled_, layer, stream);
  list_settled_ = true;
  active_->merge.run(params, stream);
}

}  // namespace fovea::kernels::cuda::prefill
