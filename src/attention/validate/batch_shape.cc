// SPDX-License-Identifier: Apache-2.0
#include <string_view>

#include "attention/token_table.h"
#include "attention/validate/batch.h"
#include "attention/validate/spec.h"
#include "core/check.h"

namespace fovea {
namespace {

void check_at_most(int64_t value, int64_t limit, std::string_view name) {
  check_argument(value >= 0 && value <= limit, "{} is {}, must be in [0, {}]", name, value, limit);
}

void check_each(const int32_t* lens, int32_t requests, int64_t limit, std::string_view name) {
  for (int32_t i = 0; i < requests; ++i) {
    check_argument(lens[i] >= 0 && lens[i] <= limit, "{}[{}] is {}, must be in [0, {}]", name, i,
                   lens[i], limit);
  }
}

// Bounds of each request, within those of the batch.
void check_host_lens(const BatchView& batch, const BatchLimits& limits) {
  check_argument((batch.host_q_lens == nullptr) == (batch.host_kv_lens == nullptr),
                 "host_q_lens are {}, host_kv_lens are {}: give both or neither",
                 batch.host_q_lens ? "given" : "null", batch.host_kv_lens ? "given" : "null");
  if (batch.host_q_lens == nullptr) return;
  check_each(batch.host_q_lens, batch.requests,
             batch.max_q_len > 0 ? batch.max_q_len : limits.max_q_len, "host_q_lens");
  check_each(batch.host_kv_lens, batch.requests,
             batch.max_kv_len > 0 ? batch.max_kv_len : limits.max_kv_len, "host_kv_lens");
}

// On a GPU nobody sees the lengths: the bound must be one that the table has room for. A batch has
// none for its encoder.
void check_width(const BatchView& batch, const BatchRules& rules, const NamedTable& named) {
  if (rules.spec.scope == AttentionScope::cross) return;
  const bool given = batch.max_kv_len > 0;
  const int32_t longest = given ? batch.max_kv_len : rules.limits.max_kv_len;
  const int64_t width = row_tokens(named.table);
  check_argument(longest <= width, "max_kv_len is {}{}, a row of {} has {} tokens", longest,
                 given ? "" : " (that of the limits)", named.name, width);
}

void check_cache(const BatchView& batch, const BatchRules& rules) {
  need_array(batch.request_rows, "request_rows");
  if (rules.spec.scope == AttentionScope::cross) {
    need_array(batch.encoder_lens, "encoder_lens");
  } else {
    need_array(batch.kv_lens, "kv_lens");
  }
  check_width(batch, rules, validate_table(batch, rules));
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
      need_array(batch.custom_mask, "custom_mask");
      need_array(batch.custom_mask_indptr, "custom_mask_indptr");
      return;
    case MaskKind::prefix_spans:
      need_array(batch.span_indptr, "span_indptr");
      return;
    case MaskKind::multi_item:
      need_array(batch.item_prefix_lens, "item_prefix_lens");
      need_array(batch.token_pos_in_items, "token_pos_in_items");
      check_argument(batch.token_pos_in_items_stride >= 0,
                     "token_pos_in_items_stride is {}, must not be negative",
                     batch.token_pos_in_items_stride);
      check_reach({.data = batch.token_pos_in_items,
                   .element_bytes = sizeof(uint16_t),
                   .row = batch.token_pos_in_items_stride,
                   .dimensions = {{{batch.requests, batch.token_pos_in_items_stride}}}},
                  "token_pos_in_items");
      return;
  }
}

void check_alignment(const BatchView& batch) {
  check_aligned(batch.host_q_lens, "host_q_lens");
  check_aligned(batch.host_kv_lens, "host_kv_lens");
  check_aligned(batch.q_indptr, "q_indptr");
  check_aligned(batch.kv_lens, "kv_lens");
  check_aligned(batch.request_rows, "request_rows");
  check_aligned(batch.out_slots, "out_slots");
  check_aligned(batch.positions, "positions");
  check_aligned(batch.shared_prefix, "shared_prefix");
  check_aligned(batch.encoder_lens, "encoder_lens");
  check_aligned(batch.tree_mask, "tree_mask");
  check_aligned(batch.custom_mask_indptr, "custom_mask_indptr");
  check_aligned(batch.spans, "spans");
  check_aligned(batch.span_indptr, "span_indptr");
  check_aligned(batch.item_prefix_lens, "item_prefix_lens");
  check_aligned(batch.token_pos_in_items, "token_pos_in_items");
  check_aligned(batch.state_slots, "state_slots");
  check_aligned(batch.snapshot_slots, "snapshot_slots");
}

}  // namespace

void need_array(const void* array, std::string_view name) {
  check_argument(array != nullptr, "{} is null, the batch needs it", name);
}

NamedTable validate_table(const BatchView& batch, const BatchRules& rules) {
  const bool cross = rules.spec.scope == AttentionScope::cross;
  const std::string_view slots = cross ? "encoder_slots" : "request_slots";
  const std::string_view pages = cross ? "encoder_page_table" : "page_table";
  const bool has_slots = (cross ? batch.encoder_slots : batch.request_slots) != nullptr;
  const bool has_pages = (cross ? batch.encoder_page_table : batch.page_table) != nullptr;
  check_argument(has_slots || has_pages, "{} and {} are null, the batch needs one of them", slots,
                 pages);
  check_argument(!has_slots || !has_pages, "{} and {} are given, the batch takes one of them",
                 slots, pages);
  const NamedTable named = {has_pages ? pages : slots,
                            token_table(batch, rules.spec.scope, rules.page_size)};
  check_table(named.table, named.name);
  return named;
}

void validate_batch_shape(const BatchView& batch, const BatchRules& rules) {
  check_enum(batch.mode, ForwardMode::draft_extend, "mode", "ForwardMode");
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
  check_alignment(batch);
  check_host_lens(batch, limits);
  need_array(batch.q_indptr, "q_indptr");
  if (uses_kv_cache(rules.spec)) check_cache(batch, rules);
  if (batch.tokens > 0) check_mask(batch, rules.spec);
}

}  // namespace fovea
