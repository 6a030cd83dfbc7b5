// SPDX-License-Identifier: Apache-2.0
#include "attention/prefix_levels.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "core/rounding.h"

namespace fovea {
namespace {

class Grouping {
 public:
  Grouping(const BatchView& batch, const PrefixRule& rule, int32_t* first_keys)
      : batch_(batch), rule_(rule), first_keys_(first_keys) {
    std::fill_n(first_keys_, batch_.requests, 0);
  }

  // Fills the level. Returns false if its groups save too little.
  bool next_level(const PrefixLevel& level) {
    const int32_t more = extra_saved(rule_.min_saved);
    int64_t saved = more;
    for (Group group = first(); group.begin < batch_.requests; group = next(group)) {
      if (group.size() > 1) {
        saved += (group.size() - 1) * int64_t{group.shared - first_keys_[group.begin]} - more;
      }
    }
    if (saved < std::max(rule_.min_saved, 1)) return false;
    level.q_indptr[0] = 0;
    for (Group group = first(); group.begin < batch_.requests; group = next(group)) {
      for (int32_t i = group.begin; i < group.end; ++i) {
        level.first_keys[i] = first_keys_[i];
        level.kv_lens[i] = i == group.begin && group.size() > 1 ? group.shared : 0;
        level.q_indptr[i + 1] = batch_.q_indptr[group.end];
      }
      if (group.size() == 1) continue;
      std::fill(first_keys_ + group.begin, first_keys_ + group.end, group.shared);
    }
    return true;
  }

 private:
  struct Group {
    int32_t begin = 0, end = 0;  // requests
    int32_t shared = 0;          // tokens, with more than one request
    int32_t size() const { return end - begin; }
  };

  Group group_from(int32_t begin) const {
    Group group = {begin, begin + 1, std::numeric_limits<int32_t>::max()};
    for (; group.end < batch_.requests && joins(group.end); ++group.end) {
      group.shared = std::min(group.shared, common(group.end));
    }
    return group;
  }
  Group first() const { return group_from(0); }
  Group next(const Group& group) const { return group_from(group.end); }

  int32_t q_len(int32_t request) const {
    return batch_.q_indptr[request + 1] - batch_.q_indptr[request];
  }
  int32_t cached(int32_t request) const { return batch_.kv_lens[request] - q_len(request); }
  bool is_short(int32_t request) const {
    return q_len(request) > 0 && q_len(request) <= rule_.max_q_len;
  }

  // Returns the tokens that the request shares with the previous one, all of them cached.
  int32_t common(int32_t request) const {
    return std::min({batch_.hints.shared_prefix[request], cached(request - 1), cached(request)});
  }

  // Requests that are in different groups of one level have nothing in common afterwards.
  bool joins(int32_t request) const {
    return is_short(request - 1) && is_short(request) &&
           common(request) >= first_keys_[request] + kMinPrefix;
  }

  const BatchView& batch_;
  const PrefixRule& rule_;
  int32_t* first_keys_;
};

}  // namespace

bool shares_prefixes(const AttentionSpec& spec) {
  return spec.kind == AttentionKind::mha && spec.scope == AttentionScope::decoder &&
         (spec.mask == MaskKind::none || spec.mask == MaskKind::tree) && spec.window == 0 &&
         spec.chunk == 0 && !spec.dual_chunk && !spec.scores.has_alibi && !spec.batch_invariant &&
         spec.q_heads <= kMaxPrefixRows * spec.kv_heads;
}

int32_t max_prefix_tokens(const AttentionSpec& spec, const BatchLimits& limits) {
  return static_cast<int32_t>(
      std::min<int64_t>(limits.max_tokens, int64_t{limits.max_requests} * max_prefix_q_len(spec)));
}

std::string describe_prefix_levels(const AttentionSpec& spec, const BatchLimits& limits) {
  if (limits.prefix_levels == 0 || !shares_prefixes(spec)) return {};
  return fmt::format(
      "shared prefixes are read once, in up to {} levels that save {:.1f} MB each, in passes of up "
      "to {} new tokens",
      limits.prefix_levels, static_cast<double>(limits.min_prefix_savings) / 1e6,
      max_prefix_tokens(spec, limits));
}

int32_t min_saved_keys(const KvCacheSpec& cache, const BatchLimits& limits) {
  const int64_t key_bytes = int64_t{cache.kv_heads} * (cache.head_dim + cache.head_dim_v) *
                            static_cast<int64_t>(dtype_bytes(cache.dtype));
  const int64_t limit = std::numeric_limits<int32_t>::max();
  return static_cast<int32_t>(
      ceil_div(std::min(limits.min_prefix_savings, limit * key_bytes), key_bytes));
}

int64_t max_saved_keys(const BatchView& batch, const BatchLimits& limits) {
  const int32_t longest = batch.hints.max_kv_len > 0 ? batch.hints.max_kv_len : limits.max_kv_len;
  return int64_t{std::max(batch.requests - 1, 0)} * longest;
}

int32_t find_prefix_levels(const BatchView& batch, const PrefixRule& rule,
                           std::span<const PrefixLevel> levels, int32_t* first_keys) {
  Grouping grouping(batch, rule, first_keys);
  int32_t used = 0;
  while (used < static_cast<int32_t>(levels.size()) && grouping.next_level(levels[used])) ++used;
  return used;
}

}  // namespace fovea
