// SPDX-License-Identifier: Apache-2.0
#include "engine/pass_arrays.h"

#include <algorithm>

#include "core/check.h"
#include "fovea/speculation.h"

namespace fovea {
namespace {

void fill_ancestors(const PassPart& part, uint64_t* ancestors) {
  const auto count = static_cast<int32_t>(part.tokens.size());
  check_argument(part.parents.empty() || part.parents.size() == part.tokens.size(),
                 "a part has {} parents, must have {}, as it has tokens", part.parents.size(),
                 part.tokens.size());
  if (count > kMaxDraftNodes) {
    check_argument(part.parents.empty(), "a tree has {} tokens, the limit is {}", count,
                   kMaxDraftNodes);
    return;
  }
  for (int32_t i = 0; i < count; ++i) {
    const int32_t parent = part.parents.empty() ? i - 1 : part.parents[static_cast<size_t>(i)];
    check_argument(parent >= -1 && parent < i, "parents[{}] is {}, must be in [-1, {})", i, parent,
                   i);
    ancestors[i] = uint64_t{1} << i | (parent < 0 ? 0 : ancestors[parent]);
  }
}

}  // namespace

PassSize fill_arrays(std::span<const PassPart> parts, const BatchLimits& limits,
                     RequestTable& table, const PassArrays& arrays) {
  check_argument(parts.size() <= static_cast<size_t>(limits.max_requests),
                 "a pass has {} requests, the limit is {}", parts.size(), limits.max_requests);
  PassSize size;
  int32_t decodes = 0;
  arrays.q_indptr[0] = 0;
  for (const PassPart& part : parts) {
    const auto count = static_cast<int32_t>(part.tokens.size());
    check_argument(size.tokens + count <= limits.max_tokens,
                   "a pass has {} tokens and more, the limit is {}", size.tokens + count,
                   limits.max_tokens);
    const std::span<const int32_t> slots = table.row(part.lease->row);
    std::copy(part.tokens.begin(), part.tokens.end(), arrays.tokens + size.tokens);
    check_argument(part.features.empty() || part.features.size() == part.tokens.size(),
                   "a part has {} features, must have {}, as it has tokens", part.features.size(),
                   part.tokens.size());
    std::copy(part.features.begin(), part.features.end(), arrays.features + size.tokens);
    for (int32_t i = 0; i < count; ++i) {
      arrays.positions[size.tokens + i] = part.begin + part.depth(i);
      arrays.places[size.tokens + i] = part.begin + i;
      arrays.out_slots[size.tokens + i] = slots[static_cast<size_t>(part.begin + i)];
    }
    fill_ancestors(part, arrays.ancestors + size.tokens);
    size.trees |= !part.parents.empty();
    std::fill_n(arrays.snapshot_slots + size.tokens, count, -1);
    std::ranges::copy(part.lease->draft_states, arrays.snapshot_slots + size.tokens);
    size.snapshots |= !part.lease->draft_states.empty();
    arrays.draft_counts[size.requests] = part.lease->kept_drafts;
    size.kept_drafts |= part.lease->kept_drafts > 0;
    size.tokens += count;
    for (int32_t row = size.tokens - part.logit_rows; row < size.tokens; ++row) {
      arrays.logit_rows[size.logit_rows++] = row;
    }
    arrays.kv_lens[size.requests] = part.begin + count;
    arrays.request_rows[size.requests] = part.lease->row;
    arrays.q_indptr[++size.requests] = size.tokens;
    size.max_q_len = std::max(size.max_q_len, count);
    size.max_kv_len = std::max(size.max_kv_len, part.begin + count);
    decodes += count == 1;
  }
  size.mode = decodes == size.requests ? ForwardMode::decode
              : decodes == 0           ? ForwardMode::extend
                                       : ForwardMode::mixed;
  return size;
}

}  // namespace fovea
