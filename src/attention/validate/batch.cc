// SPDX-License-Identifier: Apache-2.0
#include "attention/validate/batch.h"

#include <algorithm>

#include "attention/token_table.h"
#include "attention/validate/spec.h"
#include "core/check.h"

namespace fovea {
namespace {

constexpr int32_t kMaxTreeTokens = 64;  // bits of a tree mask

int32_t q_len_of(const BatchView& batch, int32_t request) {
  return batch.q_indptr[request + 1] - batch.q_indptr[request];
}

void check_query_lengths(const BatchView& batch, const BatchLimits& limits) {
  check_argument(batch.q_indptr[0] == 0, "q_indptr[0] is {}, must be 0", batch.q_indptr[0]);
  const int32_t uniform = batch.requests > 0 ? q_len_of(batch, 0) : 0;
  for (int32_t request = 0; request < batch.requests; ++request) {
    const int32_t begin = batch.q_indptr[request], end = batch.q_indptr[request + 1];
    check_argument(end >= begin, "q_indptr[{}] is {}, less than q_indptr[{}] = {}: not monotone",
                   request + 1, end, request, begin);
    const int32_t q_len = end - begin;
    check_argument(q_len <= limits.max_q_len, "request {}: q_len is {}, at most {}", request, q_len,
                   limits.max_q_len);
    check_argument(batch.mode != ForwardMode::decode || q_len <= 1,
                   "request {}: q_len is {}, mode decode takes 1", request, q_len);
    check_argument(batch.mode != ForwardMode::target_verify || q_len == uniform,
                   "request {}: q_len is {}, mode target_verify takes the same for all ({})",
                   request, q_len, uniform);
  }
  check_argument(batch.q_indptr[batch.requests] == batch.tokens,
                 "q_indptr[{}] is {}, must be tokens = {}", batch.requests,
                 batch.q_indptr[batch.requests], batch.tokens);
}

// Checks lengths. A length of 0 marks a padded request, whose rows see no key.
void check_kv_lengths(const BatchView& batch, const BatchRules& rules) {
  need_array(batch.kv_lens.data(), "kv_lens");
  for (int32_t request = 0; request < batch.requests; ++request) {
    const int32_t kv_len = batch.kv_lens[request];
    check_argument(kv_len >= 0 && kv_len <= rules.limits.max_kv_len,
                   "request {}: kv_len is {}, must be in [0, {}]", request, kv_len,
                   rules.limits.max_kv_len);
    check_argument(kv_len == 0 || kv_len >= q_len_of(batch, request),
                   "request {}: kv_len is {}, less than its {} new tokens", request, kv_len,
                   q_len_of(batch, request));
  }
}

// Returns false for packed keys, which are as many as the queries, and for cross attention, which
// sees the encoder's.
bool looks_at_kv_lens(const AttentionSpec& spec) {
  return !is_packed(spec.scope) && spec.scope != AttentionScope::cross;
}

// Checks the bounds in the hints: on a GPU, wrong bounds would select a kernel for shorter
// requests.
void check_bounds(const BatchView& batch, const AttentionSpec& spec) {
  for (int32_t request = 0; request < batch.requests; ++request) {
    check_argument(batch.hints.max_q_len == 0 || q_len_of(batch, request) <= batch.hints.max_q_len,
                   "request {}: q_len is {}, above the batch's max_q_len of {}", request,
                   q_len_of(batch, request), batch.hints.max_q_len);
    const bool own = !batch.hints.host_q_lens.empty();
    check_argument(!own || q_len_of(batch, request) <= batch.hints.host_q_lens[request],
                   "request {}: q_len is {}, above its hints.host_q_lens of {}", request,
                   q_len_of(batch, request), own ? batch.hints.host_q_lens[request] : 0);
    if (!looks_at_kv_lens(spec)) continue;
    const int32_t kv_len = batch.kv_lens[request];
    check_argument(batch.hints.max_kv_len == 0 || kv_len <= batch.hints.max_kv_len,
                   "request {}: kv_len is {}, above the batch's max_kv_len of {}", request, kv_len,
                   batch.hints.max_kv_len);
    check_argument(!own || kv_len <= batch.hints.host_kv_lens[request],
                   "request {}: kv_len is {}, above its hints.host_kv_lens of {}", request, kv_len,
                   own ? batch.hints.host_kv_lens[request] : 0);
  }
}

void check_encoder(const BatchView& batch, const BatchLimits& limits) {
  for (int32_t request = 0; request < batch.requests; ++request) {
    const int32_t length = batch.cross.lens[request];
    check_argument(length >= 0 && length <= limits.max_encoder_len,
                   "request {}: cross.lens is {}, must be in [0, {}]", request, length,
                   limits.max_encoder_len);
  }
}

void check_table(const BatchView& batch, const BatchRules& rules) {
  const auto [name, table] = validate_table(batch, rules);
  const bool cross = rules.spec.scope == AttentionScope::cross;
  const std::span<const int32_t> lens = cross ? batch.cross.lens : batch.kv_lens;
  const int64_t room = row_tokens(table);
  for (int32_t request = 0; request < batch.requests; ++request) {
    check_argument(lens[request] <= room, "request {}: {} is {}, its row of {} has {} tokens",
                   request, cross ? "cross.lens" : "kv_len", lens[request], name, room);
  }
}

void check_slot(const BatchRules& rules, int32_t token, int64_t slot) {
  check_argument(slot >= -1 && slot < rules.slots, "out_slots[{}] is {}, must be in [-1, {})",
                 token, slot, rules.slots);
  if (slot < 0 || rules.slot_map.empty()) return;
  const int64_t here = rules.slot_map[static_cast<size_t>(slot)];
  check_argument(here >= -1 && here < rules.mapped_slots,
                 "out_slots[{}] is {}, which slot_map() of the pool puts in slot {} of [-1, {})",
                 token, slot, here, rules.mapped_slots);
}

// Checks that padding, and only padding, writes to a reserved page 0. Without one it writes
// nowhere.
void check_page_zero(const BatchRules& rules, int32_t token, int64_t slot, bool padding) {
  if (slot < 0) return;
  if (!rules.reserves_page_zero) {
    check_argument(!padding, "out_slots[{}] is {}, must be -1: its request is padding", token,
                   slot);
    return;
  }
  check_argument((slot < rules.page_size) == padding,
                 "out_slots[{}] is {}, {} page 0 of {} slots: its request is {}padding", token,
                 slot, padding ? "outside" : "in", rules.page_size, padding ? "" : "not ");
}

void check_slots(const BatchView& batch, const BatchRules& rules) {
  const TokenTable& table = key_table(batch, rules.spec.scope);
  // With cross attention, out_slots may name slots of the decoder's own pool.
  const bool own = rules.spec.scope != AttentionScope::cross;
  for (int32_t request = 0; request < batch.requests; ++request) {
    const int32_t row = batch.request_rows[request];
    check_argument(row >= 0 && row < table.rows,
                   "request_rows[{}] is {}, must be in [0, {}), the rows of the table", request,
                   row, table.rows);
    if (batch.out_slots.empty()) continue;  // forward() requires them if it stores
    const bool padding =
        own && (batch.kv_lens[request] == 0 ||
                (rules.reserves_page_zero && is_padded(table, row, batch.kv_lens[request])));
    for (int32_t token = batch.q_indptr[request]; token < batch.q_indptr[request + 1]; ++token) {
      check_slot(rules, token, batch.out_slots[token]);
      if (own) check_page_zero(rules, token, batch.out_slots[token], padding);
    }
  }
}

void check_positions(const BatchView& batch) {
  for (int32_t request = 0; request < batch.requests; ++request) {
    const int32_t kv_len = batch.kv_lens[request];
    if (kv_len == 0) continue;
    for (int32_t token = batch.q_indptr[request]; token < batch.q_indptr[request + 1]; ++token) {
      check_argument(batch.positions[token] >= 0 && batch.positions[token] < kv_len,
                     "positions[{}] is {}, must be in [0, {}), the length of request {}", token,
                     batch.positions[token], kv_len, request);
    }
  }
}

void check_tree(const BatchView& batch) {
  if (batch.masks.tree.ancestors.empty()) return;
  for (int32_t request = 0; request < batch.requests; ++request) {
    check_argument(q_len_of(batch, request) <= kMaxTreeTokens,
                   "request {}: {} new tokens, a tree mask covers {}", request,
                   q_len_of(batch, request), kMaxTreeTokens);
  }
}

void check_custom(const BatchView& batch, bool packed) {
  const CustomMask& custom = batch.masks.custom;
  check_argument(custom.indptr[0] >= 0, "masks.custom.indptr[0] is {}, must not be negative",
                 custom.indptr[0]);
  for (int32_t request = 0; request < batch.requests; ++request) {
    const int64_t q_len = q_len_of(batch, request);
    const int64_t kv_len = packed ? q_len : batch.kv_lens[request];
    check_argument(custom.indptr[request + 1] >= 0,
                   "masks.custom.indptr[{}] is {}, must not be negative", request + 1,
                   custom.indptr[request + 1]);
    // Unsigned, because wild entries may be further apart than int64 holds.
    const auto length = static_cast<int64_t>(static_cast<uint64_t>(custom.indptr[request + 1]) -
                                             static_cast<uint64_t>(custom.indptr[request]));
    check_argument(length == q_len * kv_len,
                   "request {}: its custom mask has {} bytes, q_len * kv_len = {} * {} needs {}",
                   request, length, q_len, kv_len, q_len * kv_len);
  }
  const int64_t end = custom.indptr[batch.requests];
  check_argument(end <= static_cast<int64_t>(custom.visible.size()),
                 "masks.custom.visible has {} bytes, masks.custom.indptr ends at {}",
                 custom.visible.size(), end);
}

void check_spans(const BatchView& batch) {
  const PrefixSpans& spans = batch.masks.spans;
  check_argument(spans.indptr[0] >= 0, "masks.spans.indptr[0] is {}, must not be negative",
                 spans.indptr[0]);
  for (int32_t request = 0; request < batch.requests; ++request) {
    const int32_t begin = spans.indptr[request], end = spans.indptr[request + 1];
    check_argument(end >= begin,
                   "masks.spans.indptr[{}] is {}, less than masks.spans.indptr[{}] = {}",
                   request + 1, end, request, begin);
    check_argument(2 * int64_t{end} <= static_cast<int64_t>(spans.bounds.size()),
                   "masks.spans.bounds has {} elements, the spans of request {} end at {}",
                   spans.bounds.size(), request, 2 * int64_t{end});
    for (int64_t span = begin; span < end; ++span) {
      const int32_t from = spans.bounds[2 * span], to = spans.bounds[2 * span + 1];
      check_argument(from >= 0 && from <= to, "request {}: span [{}, {}) is not a range", request,
                     from, to);
    }
  }
}

void check_items(const BatchView& batch) {
  for (int32_t request = 0; request < batch.requests; ++request) {
    const int64_t items = batch.kv_lens[request] - int64_t{batch.masks.items.prefix_lens[request]};
    check_argument(
        items <= batch.masks.items.stride,
        "request {}: {} tokens after its prefix of {}, a row of masks.items.token_pos has {}",
        request, items, batch.masks.items.prefix_lens[request], batch.masks.items.stride);
  }
}

void check_mask(const BatchView& batch, const AttentionSpec& spec) {
  switch (spec.mask) {
    case MaskKind::none:
      return;
    case MaskKind::tree:
      return check_tree(batch);
    case MaskKind::custom:
      return check_custom(batch, is_packed(spec.scope));
    case MaskKind::prefix_spans:
      return check_spans(batch);
    case MaskKind::multi_item:
      return check_items(batch);
  }
}

void check_states(const BatchView& batch, int32_t slots) {
  need_array(batch.linear.state_slots.data(), "linear.state_slots");
  for (int32_t request = 0; request < batch.requests; ++request) {
    const int32_t slot = batch.linear.state_slots[request];
    check_argument(slot >= -1 && slot < slots, "linear.state_slots[{}] is {}, must be in [-1, {})",
                   request, slot, slots);
    if (slot <= 0 || q_len_of(batch, request) == 0) continue;  // the dummy slot may be shared
    for (int32_t earlier = 0; earlier < request; ++earlier) {
      check_argument(slot != batch.linear.state_slots[earlier] || q_len_of(batch, earlier) == 0,
                     "linear.state_slots[{}] is {}, which is linear.state_slots[{}]", request, slot,
                     earlier);
    }
  }
}

void check_snapshots(const BatchView& batch, int32_t slots) {
  for (int32_t token = 0; token < batch.tokens; ++token) {
    const int32_t slot = batch.linear.snapshot_slots[token];
    check_argument(slot >= -1 && slot < slots,
                   "linear.snapshot_slots[{}] is {}, must be in [-1, {})", token, slot, slots);
    if (slot < 0) continue;
    for (int32_t request = 0; request < batch.requests; ++request) {
      check_argument(slot != batch.linear.state_slots[request],
                     "linear.snapshot_slots[{}] is {}, which is linear.state_slots[{}]", token,
                     slot, request);
    }
    for (int32_t earlier = 0; earlier < token; ++earlier) {
      check_argument(slot != batch.linear.snapshot_slots[earlier],
                     "linear.snapshot_slots[{}] is {}, which is linear.snapshot_slots[{}]", token,
                     slot, earlier);
    }
  }
}

// Checks the drafts of a request, and that its slot holds the tokens that it continues from.
void check_drafts(const BatchView& batch, const BatchRules& rules) {
  for (int32_t request = 0; request < batch.requests; ++request) {
    const int32_t q_len = q_len_of(batch, request), slot = batch.linear.state_slots[request];
    if (!batch.linear.draft_counts.empty()) {
      const int32_t limit = std::min(q_len, rules.max_drafts);
      check_argument(
          batch.linear.draft_counts[request] >= 0 && batch.linear.draft_counts[request] <= limit,
          "linear.draft_counts[{}] is {}, must be in [0, {}]: it has {} new tokens, and a slot "
          "keeps {}",
          request, batch.linear.draft_counts[request], limit, q_len, rules.max_drafts);
    }
    const int32_t before = batch.kv_lens[request] - q_len;
    if (slot <= 0 || q_len == 0 || before <= 0) continue;
    const StateMark& mark = rules.marks[slot];
    check_argument(before >= mark.tokens && before - mark.tokens <= mark.drafts,
                   "request {}: it continues from {} tokens, linear.state_slots[{}] = {} holds {} "
                   "and {} drafts",
                   request, before, request, slot, mark.tokens, mark.drafts);
  }
}

// Returns the first position of a request's new tokens.
int32_t first_position(const BatchView& batch, int32_t request) {
  const int32_t begin = batch.q_indptr[request], end = batch.q_indptr[request + 1];
  if (!batch.positions.empty()) {
    return *std::min_element(batch.positions.begin() + begin, batch.positions.begin() + end);
  }
  return std::max(batch.kv_lens[request] - (end - begin), 0);
}

}  // namespace

int64_t pool_slots(const KvPool& pool) {
  return pool.slot_map().empty() ? pool.pages() * pool.spec().page_size
                                 : static_cast<int64_t>(pool.slot_map().size());
}

void validate_batch(const BatchView& batch, const BatchRules& rules) {
  validate_batch_shape(batch, rules);
  if (batch.mode == ForwardMode::idle || batch.requests == 0) return;
  const BatchLimits& limits = rules.limits;
  check_query_lengths(batch, limits);
  const AttentionSpec& spec = rules.spec;
  if (looks_at_kv_lens(spec)) check_kv_lengths(batch, rules);
  if (spec.scope == AttentionScope::cross) check_encoder(batch, limits);
  if (uses_kv_cache(spec)) {
    check_table(batch, rules);
    check_slots(batch, rules);
  }
  check_bounds(batch, spec);
  if (is_linear(spec.kind)) {
    check_states(batch, rules.state_slots);
    if (!batch.linear.snapshot_slots.empty()) check_snapshots(batch, rules.state_slots);
    if (rules.marks != nullptr) check_drafts(batch, rules);
  }
  if (!batch.positions.empty() && spec.scope == AttentionScope::decoder) check_positions(batch);
  if (batch.tokens > 0) check_mask(batch, spec);
}

void check_out_slots_differ(const BatchView& batch, const BatchRules& rules, SlotSet& written) {
  if (batch.mode == ForwardMode::idle || batch.out_slots.empty()) return;
  written.clear();
  const int32_t first_slot = rules.reserves_page_zero ? rules.page_size : 0;
  for (int32_t token = 0; token < batch.tokens; ++token) {
    const int64_t slot = batch.out_slots[token];
    if (slot < first_slot) continue;  // none, or padding
    const std::optional<int32_t> earlier = written.add(slot, token);
    check_argument(!earlier, "out_slots[{}] is {}, which is out_slots[{}]", token, slot,
                   earlier.value_or(0));
  }
}

void find_first_keys(const BatchView& batch, const AttentionSpec& spec, int32_t* first_keys) {
  for (int32_t request = 0; request < batch.requests; ++request) {
    const int32_t q_len = q_len_of(batch, request);
    const int32_t kv_len = batch.kv_lens[request];
    if (q_len == 0 || kv_len == 0) {
      first_keys[request] = kv_len;
      continue;
    }
    const int32_t position = first_position(batch, request);
    int32_t first = 0;
    if (spec.window > 0) first = std::max(first, position - spec.window + 1);
    if (spec.chunk > 0) first = std::max(first, position / spec.chunk * spec.chunk);
    if (spec.mask == MaskKind::prefix_spans) {
      for (int64_t span = batch.masks.spans.indptr[request];
           span < batch.masks.spans.indptr[request + 1]; ++span) {
        if (batch.masks.spans.bounds[2 * span + 1] > position)
          first = std::min(first, batch.masks.spans.bounds[2 * span]);
      }
    }
    // Positions of drafts in a tree are less than their key numbers, so all new keys are kept.
    first_keys[request] = std::min(first, kv_len - q_len);
  }
}

}  // namespace fovea
