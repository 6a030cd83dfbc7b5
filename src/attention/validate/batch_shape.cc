// SPDX-License-Identifier: Apache-2.0
#include <string_view>

#include "attention/batch_arrays.h"
#include "attention/token_table.h"
#include "attention/validate/batch.h"
#include "attention/validate/spec.h"
#include "core/check.h"

namespace fovea {
namespace {

void check_at_most(int64_t value, int64_t limit, std::string_view name) {
  check_argument(value >= 0 && value <= limit, "{} is {}, must be in [0, {}]", name, value, limit);
}

void check_each(std::span<const int32_t> lens, int32_t requests, int64_t limit,
                std::string_view name) {
  for (int32_t i = 0; i < requests; ++i) {
    check_argument(lens[i] >= 0 && lens[i] <= limit, "{}[{}] is {}, must be in [0, {}]", name, i,
                   lens[i], limit);
  }
}

// Checks the bounds of each request against those of the batch.
void check_host_lens(const BatchView& batch, const BatchLimits& limits) {
  check_argument(batch.hints.host_q_lens.empty() == batch.hints.host_kv_lens.empty(),
                 "hints.host_q_lens are {}, hints.host_kv_lens are {}: give both or neither",
                 batch.hints.host_q_lens.empty() ? "absent" : "given",
                 batch.hints.host_kv_lens.empty() ? "absent" : "given");
  if (batch.hints.host_q_lens.empty()) return;
  check_each(batch.hints.host_q_lens, batch.requests,
             batch.hints.max_q_len > 0 ? batch.hints.max_q_len : limits.max_q_len,
             "hints.host_q_lens");
  check_each(batch.hints.host_kv_lens, batch.requests,
             batch.hints.max_kv_len > 0 ? batch.hints.max_kv_len : limits.max_kv_len,
             "hints.host_kv_lens");
}

// Checks that the table has room for the bound on lengths, because on a GPU the host cannot read
// the lengths. There is no such bound for the encoder.
void check_width(const BatchView& batch, const BatchRules& rules, const NamedTable& named) {
  if (rules.spec.scope == AttentionScope::cross) return;
  const bool given = batch.hints.max_kv_len > 0;
  const int32_t longest = given ? batch.hints.max_kv_len : rules.limits.max_kv_len;
  const int64_t width = row_tokens(named.table);
  check_argument(longest <= width, "hints.max_kv_len is {}{}, a row of {} has {} tokens", longest,
                 given ? "" : " (that of the limits)", named.name, width);
}

void check_cache(const BatchView& batch, const BatchRules& rules) {
  need_array(batch.request_rows.data(), "request_rows");
  if (rules.spec.scope == AttentionScope::cross) {
    need_array(batch.cross.lens.data(), "cross.lens");
  } else {
    need_array(batch.kv_lens.data(), "kv_lens");
  }
  check_width(batch, rules, validate_table(batch, rules));
}

void check_items(const MultiItemMask& items, int32_t requests) {
  need_array(items.prefix_lens.data(), "masks.items.prefix_lens");
  need_array(items.token_pos.data(), "masks.items.token_pos");
  check_argument(items.stride >= 0, "masks.items.stride is {}, must not be negative", items.stride);
  check_reach({.data = items.token_pos.data(),
               .element_bytes = sizeof(uint16_t),
               .row = items.stride,
               .dimensions = {{{requests, items.stride}}}},
              "masks.items.token_pos");
  const int64_t extent = requests * items.stride;
  check_argument(static_cast<int64_t>(items.token_pos.size()) >= extent,
                 "masks.items.token_pos has {} elements, the batch needs {}",
                 items.token_pos.size(), extent);
}

void check_mask(const BatchView& batch, const AttentionSpec& spec) {
  switch (spec.mask) {
    case MaskKind::none:
      return;
    case MaskKind::tree:
      check_argument(
          !batch.masks.tree.ancestors.empty() || batch.mode != ForwardMode::target_verify,
          "masks.tree.ancestors is absent, mode target_verify of a spec with mask tree needs it");
      return;
    case MaskKind::custom:
      need_array(batch.masks.custom.visible.data(), "masks.custom.visible");
      need_array(batch.masks.custom.indptr.data(), "masks.custom.indptr");
      return;
    case MaskKind::prefix_spans:
      need_array(batch.masks.spans.indptr.data(), "masks.spans.indptr");
      return;
    case MaskKind::multi_item:
      return check_items(batch.masks.items, batch.requests);
  }
}

void check_arrays(const BatchView& batch) {
  for_each_array(batch, [](const BatchArray& array) {
    if (array.data == nullptr) return;
    check_argument(reinterpret_cast<uintptr_t>(array.data) % array.element_bytes == 0,
                   "{} is at {}, must be aligned to {} bytes", array.name, array.data,
                   array.element_bytes);
    check_argument(static_cast<int64_t>(array.size) >= array.extent,
                   "{} has {} elements, the batch needs {}", array.name, array.size, array.extent);
  });
}

}  // namespace

void need_array(const void* array, std::string_view name) {
  check_argument(array != nullptr, "{} is absent, the batch needs it", name);
}

NamedTable validate_table(const BatchView& batch, const BatchRules& rules) {
  const bool cross = rules.spec.scope == AttentionScope::cross;
  const NamedTable named = {cross ? "cross.table" : "table", key_table(batch, rules.spec.scope)};
  need_array(named.table.entries, named.name);
  check_table(named.table, named.name);
  check_argument(named.table.entry_tokens == 1 || named.table.entry_tokens == rules.page_size,
                 "{}.entry_tokens is {}, must be 1 (slots) or {} (pages of the pool)", named.name,
                 named.table.entry_tokens, rules.page_size);
  return named;
}

void validate_batch_shape(const BatchView& batch, const BatchRules& rules) {
  check_enum(batch.mode, ForwardMode::target_verify, "mode", "ForwardMode");
  if (batch.mode == ForwardMode::idle) return;
  const BatchLimits& limits = rules.limits;
  check_at_most(batch.requests, limits.max_requests, "requests");
  check_at_most(batch.tokens, limits.max_tokens, "tokens");
  check_at_most(batch.hints.max_q_len, limits.max_q_len, "hints.max_q_len");
  check_at_most(batch.hints.max_kv_len, limits.max_kv_len, "hints.max_kv_len");
  if (batch.requests == 0) {
    check_argument(batch.tokens == 0, "tokens is {}, a batch without requests has 0", batch.tokens);
    return;
  }
  check_argument(batch.mode != ForwardMode::decode || batch.hints.max_q_len <= 1,
                 "hints.max_q_len is {}, mode decode takes 1", batch.hints.max_q_len);
  check_argument(batch.mode != ForwardMode::decode || batch.tokens <= batch.requests,
                 "tokens is {}, mode decode takes 1 for each of {} requests", batch.tokens,
                 batch.requests);
  check_arrays(batch);
  check_host_lens(batch, limits);
  check_argument(
      batch.linear.draft_counts.empty() || rules.max_drafts > 0 || !is_linear(rules.spec.kind),
      "linear.draft_counts is given, the state pool keeps no drafts: its max_drafts is 0");
  need_array(batch.q_indptr.data(), "q_indptr");
  if (uses_kv_cache(rules.spec)) check_cache(batch, rules);
  if (batch.tokens > 0) check_mask(batch, rules.spec);
}

}  // namespace fovea
