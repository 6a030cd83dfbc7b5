// SPDX-License-Identifier: Apache-2.0
#include "engine/draft_model.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "core/check.h"
#include "engine/group_backends.h"

namespace fovea {
namespace {

// A step computes the request's last token, and before it the last draft if all were accepted.
constexpr int32_t kDraftWidth = 2;

// Returns the bytes of the states that the model wants, whatever the length of requests.
size_t state_bytes(const ModelInfo& model, const EngineOptions& options) {
  const int32_t requests = std::min(options.max_requests, options.max_batch_tokens);
  const int32_t cached = options.prefix_cache ? requests : 0;
  size_t bytes = 0;
  for (const CacheGroup& group : cache_groups(model, options)) {
    if (!group.state) continue;
    const int32_t slots = state_slots(*group.state, requests, options.max_drafts, cached);
    bytes += static_cast<size_t>(slots) * group.state->bytes_per_slot();
  }
  return bytes;
}

double page_bytes(const ModelInfo& model, const EngineOptions& options) {
  double bytes = 0;
  for (const CacheGroup& group : cache_groups(model, options))
    if (group.kv) bytes += static_cast<double>(kv_pool_bytes(*group.kv, 1));
  return bytes;
}

}  // namespace

bool has_draft_model(const EngineOptions& options) {
  return options.speculate.starts_with(kDraftPrefix) || options.speculate.starts_with(kEaglePrefix);
}

DraftModel load_draft_model(const EngineOptions& options, std::shared_ptr<ModelDevice> device,
                            ThreadPool& threads, Model& model) {
  DraftModel draft{nullptr, options};
  const bool is_head = options.speculate.starts_with(kEaglePrefix);
  draft.options.model_path =
      options.speculate.substr(is_head ? kEaglePrefix.size() : kDraftPrefix.size());
  draft.options.speculate.clear();
  draft.options.always_speculate = false;
  draft.options.backend = {};
  draft.options.decode_backend.reset();
  if (is_head) {
    std::optional<RandomSource> random;
    if (options.random_weights) random = RandomSource{*options.random_weights, &threads};
    std::unique_ptr<EagleHead> head =
        load_eagle_head(draft.options.model_path, std::move(device), model, random);
    draft.head = head.get();
    model.set_tap(head->tap());
    draft.model = std::move(head);
    return draft;
  }
  draft.model = load_model_of(draft.options, std::move(device), threads);
  const ModelInfo& info = draft.model->info();
  const bool has_states = std::ranges::any_of(
      info.groups, [](const LayerGroup& group) { return is_linear(group.spec.kind); });
  if (has_states) {
    fail(ErrorCode::unsupported,
         "speculate: the draft model {} has recurrent states, which cannot forget rejected drafts",
         info.architecture);
  }
  return draft;
}

void divide_budget(const ModelInfo& model, size_t free_bytes, EngineOptions& options,
                   DraftModel& draft) {
  const ModelInfo& info = draft.model->info();
  check_argument(model.vocabulary == info.vocabulary,
                 "speculate: the draft model has a vocabulary of {} tokens, the model of {}",
                 info.vocabulary, model.vocabulary);
  const double own = page_bytes(model, options), other = page_bytes(info, draft.options);
  const double features =
      draft.head == nullptr ? 0
                            : static_cast<double>(draft.head->feature_bytes(options.page_size, 0));
  const size_t budget = options.kv_memory_bytes > 0 ? options.kv_memory_bytes : free_bytes / 2;
  const size_t states = std::min(budget / 2, state_bytes(model, options));
  const double share = static_cast<double>(budget - states) / (own + other + features);
  draft.options.kv_memory_bytes = static_cast<size_t>(share * other);
  options.kv_memory_bytes =
      budget - draft.options.kv_memory_bytes - static_cast<size_t>(share * features);
  draft.options.max_context = std::min(options.max_context, info.max_context);
}

SizedEngine size_draft_model(const DraftModel& draft, const DeviceInfo& device) {
  SizedEngine sized = size_engine(draft.options, draft.model->info(), device, 0);
  // A head computes all tokens of a step anew, because their features are known then. A tree is
  // computed as a whole.
  const bool wide = draft.head != nullptr || draft.options.draft_branches > 1;
  sized.max_width = wide ? 1 + draft.options.max_drafts : kDraftWidth;
  sized.masked_draws = false;
  sized.drawn_lists = 0;  // that of the model's runner
  if (draft.options.draft_branches > 1) {
    sized.likeliest = draft.options.draft_branches;
    sized.scheduling.max_drafts = draft.options.max_drafts;
  }
  return sized;
}

size_t draft_bytes(const DraftModel& draft, const SizedEngine& sized, int64_t slots, int threads) {
  size_t bytes = planned_memory(*draft.model, sized, threads).total();
  if (draft.head != nullptr) bytes += draft.head->feature_bytes(slots, sized.limits.max_tokens);
  return bytes;
}

float* connect_head(const DraftModel& draft, int64_t slots, Model& model) {
  if (draft.head == nullptr) return nullptr;
  const FeatureTap tap = draft.head->reserve_features(slots, draft.options.max_batch_tokens);
  model.set_tap(tap);
  return tap.rows;
}

}  // namespace fovea
