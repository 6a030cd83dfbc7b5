// SPDX-License-Identifier: Apache-2.0
#include "attention/host/kept_drafts.h"

#include <algorithm>
#include <cstring>

namespace fovea {
namespace {

// Returns the bytes of a state and the values of a window.
int64_t state_bytes(const StateCacheSpec& spec) {
  return int64_t{spec.heads} * spec.rows * spec.columns *
         static_cast<int64_t>(dtype_bytes(spec.dtype));
}
int64_t window_size(const StateCacheSpec& spec) {
  return int64_t{spec.conv_dim} * (spec.conv_width - 1);
}

std::byte* state_at(const StateLayerView& state, const StateCacheSpec& spec, int32_t slot) {
  return static_cast<std::byte*>(state.state) +
         slot * state.state_slot_stride * static_cast<int64_t>(dtype_bytes(spec.dtype));
}

}  // namespace

KeptDrafts::KeptDrafts(const AttentionSpec& spec, const StatePool& pool)
    : pool_(pool), layout_(draft_row(spec)), channels_(spec.linear.conv_dim()) {
  const auto drafts = static_cast<size_t>(pool.spec().max_drafts);
  mixed_.resize(drafts * static_cast<size_t>(channels_));
  decays_.resize(drafts * static_cast<size_t>(layout_.decays));
  betas_.resize(drafts * static_cast<size_t>(layout_.betas));
  convolved_.resize(spec.linear.conv_width > 0 ? mixed_.size() : 0);
  out_.resize(drafts * static_cast<size_t>(spec.linear.value_heads) *
              static_cast<size_t>(spec.linear.value_dim));
  window_.resize(static_cast<size_t>(window_size(pool.spec())));
  state_.resize(static_cast<size_t>(state_bytes(pool.spec())));
}

void KeptDrafts::plan(const BatchView& batch, DraftTokens* to) const {
  StateMark* const marks = pool_.marks();
  const LinearBatch& linear = batch.linear;
  for (int32_t request = 0; request < batch.requests; ++request) {
    const int32_t begin = batch.q_indptr[request], end = batch.q_indptr[request + 1];
    const int32_t slot = linear.state_slots[request];
    const int32_t before = std::max(batch.kv_lens[request] - (end - begin), 0);
    to[request] = {};
    for (int32_t token = begin; token < end && !linear.snapshot_slots.empty(); ++token) {
      const int32_t snapshot = linear.snapshot_slots[token];
      if (snapshot >= 0) marks[snapshot] = {.tokens = before + token - begin + 1};
    }
    if (slot <= 0 || begin == end) continue;
    const StateMark mark = before == 0 ? StateMark{} : marks[slot];
    DraftTokens& tokens = to[request];
    tokens.replayed = before - mark.tokens;
    tokens.drafts = linear.draft_counts.empty() ? 0 : linear.draft_counts[request];
    tokens.row = mark.row;
    marks[slot] = {.tokens = before + end - begin - tokens.drafts,
                   .drafts = tokens.drafts,
                   .row = (mark.row + tokens.replayed) % (2 * pool_.spec().max_drafts)};
  }
}

float* KeptDrafts::row(const StateLayerView& state, int32_t slot, const DraftTokens& tokens,
                       int32_t index) const {
  const int64_t rows = 2 * int64_t{pool_.spec().max_drafts};
  return state.drafts + (slot * rows + (tokens.row + index) % rows) * layout_.size;
}

LinearTensors KeptDrafts::gather(const LinearTensors& given, const StateLayerView& state,
                                 int32_t slot, const DraftTokens& tokens) {
  for (int32_t i = 0; i < tokens.replayed; ++i) {
    const float* const from = row(state, slot, tokens, i);
    std::copy_n(from, channels_, mixed_.data() + i * channels_);
    std::copy_n(from + layout_.decays_at, layout_.decays,
                decays_.data() + int64_t{i} * layout_.decays);
    std::copy_n(from + layout_.betas_at, layout_.betas, betas_.data() + int64_t{i} * layout_.betas);
  }
  LinearTensors gathered = given;
  gathered.mixed = mixed_.data();
  if (layout_.decays > 0) gathered.log_decay = decays_.data();
  if (layout_.betas > 0) gathered.beta = betas_.data();
  return gathered;
}

void KeptDrafts::keep(const LinearTensors& given, int32_t first, const StateLayerView& state,
                      int32_t slot, const DraftTokens& tokens) const {
  for (int32_t i = 0; i < tokens.drafts; ++i) {
    const int64_t token = int64_t{first} + i;
    float* const to = row(state, slot, tokens, tokens.replayed + i);
    std::copy_n(given.mixed + token * channels_, channels_, to);
    if (layout_.decays == 0) continue;
    std::copy_n(given.log_decay + token * layout_.decays, layout_.decays, to + layout_.decays_at);
    std::copy_n(given.beta + token * layout_.betas, layout_.betas, to + layout_.betas_at);
  }
}

void KeptDrafts::save(const StateLayerView& state, int32_t slot, bool is_new) {
  if (is_new) {
    std::fill(window_.begin(), window_.end(), 0.0f);
    std::fill(state_.begin(), state_.end(), std::byte{});
    return;
  }
  std::copy_n(state.conv + slot * state.conv_slot_stride, window_.size(), window_.data());
  if (state_.empty()) return;
  std::memcpy(state_.data(), state_at(state, pool_.spec(), slot), state_.size());
}

void KeptDrafts::restore(const StateLayerView& state, int32_t slot) const {
  std::copy_n(window_.data(), window_.size(), state.conv + slot * state.conv_slot_stride);
  if (state_.empty()) return;
  std::memcpy(state_at(state, pool_.spec(), slot), state_.data(), state_.size());
}

}  // namespace fovea
