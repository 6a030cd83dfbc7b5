// SPDX-License-Identifier: Apache-2.0
#include "engine/shared_prefixes.h"

#include <algorithm>

#include "attention/prefix_levels.h"

namespace fovea {
namespace {

// Compares pages by their first slots.
int32_t common_tokens(const int32_t* a, const int32_t* b, int32_t max_tokens, int32_t page_size) {
  int32_t tokens = 0;
  while (tokens <= max_tokens - page_size && a[tokens] == b[tokens]) tokens += page_size;
  return tokens;
}

}  // namespace

PageLandmarks page_landmarks(std::span<const int32_t> slots, int32_t page_size) {
  PageLandmarks found{};
  size_t page = 0;
  for (int32_t& landmark : found) {
    const size_t first = page * static_cast<size_t>(page_size);
    if (first >= slots.size()) break;
    landmark = slots[first];
    page = 2 * page + 1;
  }
  return found;
}

SharedPrefixes::SharedPrefixes(const std::vector<GroupSelection>& selections,
                               const BatchLimits& limits) {
  if (limits.prefix_levels == 0) return;
  for (const GroupSelection& group : selections) {
    if (!shares_prefixes(group.request.spec)) continue;
    page_size_ = group.request.cache.page_size;
    const int64_t keys = std::max(min_saved_keys(group.request.cache, limits), 1);
    min_saved_ = min_saved_ == 0 ? keys : std::min(min_saved_, keys);
    max_tokens_ = std::max(max_tokens_, max_prefix_tokens(group.request.spec, limits));
  }
}

bool SharedPrefixes::find(std::span<const PassPart> parts, const RequestTable& table,
                          std::span<int32_t> shared) const {
  size_t tokens = 0;
  int32_t longest = 0;
  for (const PassPart& part : parts) {
    tokens += part.tokens.size();
    longest = std::max(longest, part.begin);
  }
  if (tokens > static_cast<size_t>(max_tokens_)) return false;
  if (!possible(static_cast<int32_t>(parts.size()), longest)) return false;
  int64_t saved = 0;  // upper bound, as a group saves only what all its requests have in common
  const auto joins = [](const PassPart& part) {
    return part.tokens.size() <= static_cast<size_t>(kMaxPrefixRows);
  };
  const auto slots = [&](const PassPart& part) {
    return table.data() + part.lease->row * table.row_stride();
  };
  for (size_t i = 0; i < parts.size(); ++i) {
    shared[i] = 0;
    if (i == 0 || !joins(parts[i - 1]) || !joins(parts[i])) continue;
    shared[i] = common_tokens(slots(parts[i - 1]), slots(parts[i]),
                              std::min(parts[i - 1].begin, parts[i].begin), page_size_);
    if (shared[i] >= kMinPrefix) saved += shared[i];
  }
  return saved >= min_saved_;
}

}  // namespace fovea
