// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/sm90/prefill/split_keys.h"

#include <algorithm>

#include "kernels/cuda/family.h"
#include "kernels/cuda/portable/plan/launch.h"

namespace fovea::kernels::cuda::prefill {
namespace {

struct FormVariants {
  hopper::SplitForm choice;
  gpu::KernelVariant plan, merge, parts;
};

std::vector<FormVariants> find_forms(const AttentionSetup& setup) {
  std::vector<FormVariants> forms;
  if (setup.spec.batch_invariant) return forms;
  const auto add = [&](int32_t rows, float over_whole, bool few) {
    const auto parts = find_parts(setup, few);
    if (!parts) return;
    forms.push_back({{rows, over_whole},
                     plan_variant(rows, setup.sm),
                     merge_variant(rows, activation_dtype(setup.spec), setup.sm),
                     *parts});
  };
  // Whole tiles would have half of their rows empty, and fewer keys in flight.
  add(kFewPartRows, 0.65f, true);
  // Blocks of parts share no keys in pairs.
  add(kPartRows, 1.05f, false);
  return forms;
}

}  // namespace

void Parts::attend(const AttentionParams& given, int32_t tokens, bool concurrent, bool list_written,
                   int32_t layer, gpu::Launcher launcher) {
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
  params.concurrent = concurrent;
  params.list_written = list_written;
  kernel_.kernel().launch({static_cast<uint32_t>(given.work.ctas)}, params, launcher, kOverlapped);
}

int32_t SplitKeys::max_decode_rows(const AttentionSetup& setup) {
  const std::vector<FormVariants> forms = find_forms(setup);
  const bool splits_few_rows =
      cached(setup.spec) && !forms.empty() && forms.front().choice.row_tile == kFewPartRows;
  return hopper::max_decode_rows(stored(setup), splits_few_rows);
}

std::optional<int32_t> SplitKeys::row_tile(const AttentionSetup& setup,
                                           const hopper::BatchBounds& bounds) {
  std::vector<hopper::SplitForm> choices;
  for (const FormVariants& form : find_forms(setup)) choices.push_back(form.choice);
  const auto form = hopper::choose_split(choices, !cached(setup.spec), max_decode_rows(setup),
                                         setup.multiprocessors, bounds);
  return form ? std::optional(choices[*form].row_tile) : std::nullopt;
}

std::vector<gpu::KernelVariant> SplitKeys::variants(const AttentionSetup& setup) {
  std::vector<gpu::KernelVariant> all;
  for (const FormVariants& form : find_forms(setup)) {
    all.insert(all.end(), {form.plan, form.merge, form.parts});
  }
  return all;
}

// Only one plan is valid at a time, so the forms share their bytes.
WorkList SplitKeys::carve(WorkspaceCarver& workspace, const AttentionSetup& setup,
                          const BatchLimits& limits) {
  return carve_work_list(workspace, setup, limits, {.min = kFewPartRows, .max = kPartRows},
                         setup.multiprocessors);
}

SplitKeys::SplitKeys(const AttentionSetup& setup, gpu::KernelStore& store)
    : packed_(!cached(setup.spec)),
      max_decode_rows_(max_decode_rows(setup)),
      blocks_(setup.multiprocessors) {
  for (const FormVariants& form : find_forms(setup)) {
    choices_.push_back(form.choice);
    forms_.push_back({Kernel(form.plan, store), Merge(form.merge, store),
                      Parts(setup, form.parts, form.choice.row_tile, store)});
  }
}

bool SplitKeys::plan(const PlanRequest& request, hopper::BatchBounds bounds, PlanQueue& plans) {
  const BatchParams& batch = request.batch;
  if (batch.kv_lens == nullptr) bounds.kv_len = std::min(bounds.kv_len, bounds.q_len);
  const auto form = hopper::choose_split(choices_, packed_, max_decode_rows_, blocks_, bounds);
  if (!form) return false;
  active_ = &forms_[*form];
  active_->parts.share_keys(request.shared_keys);
  tokens_ = request.tokens;
  concurrent_ = bounds.concurrent;
  list_written_ = false;
  plans.add(active_->plan, PlanParams{batch, work_, 0});
  return true;
}

void SplitKeys::attend(const AttentionParams& given, int32_t layer, gpu::Launcher launcher) {
  AttentionParams params = given;
  params.work = work_;
  active_->parts.attend(params, tokens_, concurrent_, list_written_, layer, launcher);
  list_written_ = true;
  active_->merge.run(params, launcher);
}

}  // namespace fovea::kernels::cuda::prefill
