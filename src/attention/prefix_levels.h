// SPDX-License-Identifier: Apache-2.0
// Shared prefixes of a batch as levels of groups: neighbouring requests whose next keys lie in
// the same slots.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "fovea/attention_spec.h"
#include "fovea/batch.h"
#include "fovea/kv_cache.h"

namespace fovea {

// Fewer tokens are not worth a group.
inline constexpr int32_t kMinPrefix = 256;
// Packed (token, q head of a group) rows up to which a request joins a group: longer ones read
// their prefix for many rows anyway.
inline constexpr int32_t kMaxPrefixRows = 32;

inline constexpr int32_t kMaxPrefixLevels = 4;

// The groups of one level as a batch of their own, without an order among its tokens and keys.
struct PrefixLevel {
  int32_t* q_indptr = nullptr;    // [requests + 1] all new tokens of a group are those of its first
  int32_t* kv_lens = nullptr;     // [requests], 0 where no group begins
  int32_t* first_keys = nullptr;  // [requests], keys before it are those of the levels above
};

// What a group and a level must be.
struct PrefixRule {
  int32_t most_q_len = 0;   // new tokens of a request in a group
  int32_t least_saved = 0;  // keys
};

// Keys that a level saves besides for each of its groups but one: a group has row tiles of its own,
// be they nearly empty. 32 pairs of requests pay from 107000 keys on, 16 groups of four from 85000,
// one group from 31250 (H200, 2026-11-22).
inline int32_t more_saved(int32_t least_saved) { return least_saved / 11; }

// Whether layers make use of BatchView::shared_prefix.
bool shares_prefixes(const AttentionSpec& spec);

// New tokens up to which a request joins a group, for layers that share prefixes.
inline int32_t most_prefix_q_len(const AttentionSpec& spec) {
  return kMaxPrefixRows / (spec.q_heads / spec.kv_heads);
}

// New tokens up to which a pass has groups: as many as max_requests that join one can bring. So
// their states take memory by requests, however long a prompt a batch may hold; one that brings
// more has so many rows of its own that reading prefixes again costs little.
int32_t most_prefix_tokens(const AttentionSpec& spec, const BatchLimits& limits);

// For explain(): what becomes of prefixes that batches name as shared; empty: they are not looked
// at.
std::string describe_prefix_levels(const AttentionSpec& spec, const BatchLimits& limits);

// BatchLimits::min_prefix_savings in keys of such layers.
int32_t min_saved_keys(const KvCacheSpec& cache, const BatchLimits& limits);

// Keys that a level of such a batch saves at most, by its bounds alone.
int64_t most_saved_keys(const BatchView& batch, const BatchLimits& limits);

// Fills the levels from the root of the tree of prefixes down, until one saves too little, and per
// request the first key that belongs to no group. Returns how many levels have groups; the others
// are not written. Reads the batch's arrays.
int32_t find_prefix_levels(const BatchView& batch, const PrefixRule& rule,
                           std::span<const PrefixLevel> levels, int32_t* first_keys);

}  // namespace fovea
