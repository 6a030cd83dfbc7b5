// SPDX-License-Identifier: Apache-2.0
#include <string_view>

#include "attention/validate_batch.h"
#include "attention/validate_spec.h"
#include "core/check.h"

namespace fovea {
namespace {

void need(const void* array, std::string_view name) {
  check_argument(array != nullptr, "{} is null, the batch needs it", name);
}

void check_at_most(int64_t value, int64_t limit, std::string_view name) {
  check_argument(value >= 0 && value <= limit, "{} is {}, must be in [0, {}]", name, value, limit);
}

void check_tables(const BatchView& batch, const AttentionSpec& spec) {
  need(batch.request_rows, "request_rows");
  if (spec.scope == AttentionScope::cross) {
    need(batch.encoder_lens, "encoder_lens");
    need(batch.encoder_slots, "encoder_slots");
    check_argument(batch.encoder_slots_stride > 0, "encoder_slots_stride is {}, must be positive",
                   batch.encoder_slots_stride);
    return;
  }
  need(batch.kv_lens, "kv_lens");
  need(batch.request_slots, "request_slots");
  check_argument(batch.request_slots_stride > 0, "request_slots_stride is {}, must be positive",
                 batch.request_slots_stride);
}

void check_mask(const BatchView& batch, const AttentionSpec& spec) {
  switch (spec.mask) {
    case MaskKind::none:
      return;
    case MaskKind::tree:
      check_argument(batch.tree_mask != nullptr || batch.mode != ForwardMode::target_verify,
                     "tree_mask is null, mode target_verify of a spec with mask tree needs it");
      return;
    case MaskKind::custom:
      need(batch.custom_mask, "custom_mask");
      need(batch.custom_mask_indptr, "custom_mask_indptr");
      return;
    case MaskKind::prefix_spans:
      need(batch.span_indptr, "span_indptr");
      return;
    case MaskKind::multi_item:
      need(batch.item_prefix_lens, "item_prefix_lens");
      need(batch.token_pos_in_items, "token_pos_in_items");
      return;
  }
}

}  // namespace

void validate_batch_shape(const BatchView& batch, const BatchRules& rules) {
  if (batch.mode == ForwardMode::idle) return;
  const BatchLimits& limits = rules.limits;
  check_at_most(batch.requests, limits.max_requests, "requests");
  check_at_most(batch.tokens, limits.max_tokens, "tokens");
  check_at_most(batch.max_q_len, limits.max_q_len, "max_q_len");
  check_at_most(batch.max_kv_len, limits.max_kv_len, "max_kv_len");
  if (batch.requests == 0) {
    check_argument(batch.tokens == 0, "tokens is {}, a batch without requests has 0", batch.tokens);
    return;
  }
  check_argument(batch.mode != ForwardMode::decode || batch.max_q_len <= 1,
                 "max_q_len is {}, mode decode takes 1", batch.max_q_len);
  check_argument(batch.mode != ForwardMode::decode || batch.tokens <= batch.requests,
                 "tokens is {}, mode decode takes 1 for each of {} requests", batch.tokens,
                 batch.requests);
  need(batch.q_indptr, "q_indptr");
  if (uses_kv_cache(rules.spec)) check_tables(batch, rules.spec);
  check_mask(batch, rules.spec);
}

}  // namespace fovea
