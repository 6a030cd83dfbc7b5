// SPDX-License-Identifier: Apache-2.0
// Divides the shared prefixes of a batch into levels of groups. A group is a run of neighbouring
// requests whose next keys lie in the same slots.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "fovea/attention_spec.h"
#include "fovea/batch.h"
#include "fovea/kv_cache.h"

namespace fovea {

// Tokens that a group must share at least.
inline constexpr int32_t kMinPrefix = 256;
// A request joins a group with up to this many packed (token, q head of a kv head) rows. Longer
// requests read their prefix for many rows anyway.
inline constexpr int32_t kMaxPrefixRows = 32;

inline constexpr int32_t kMaxPrefixLevels = 4;

// The groups of one level in the form of a batch without order between tokens and keys. The first
// request of a group stands for it and has the new tokens of all its requests.
struct PrefixLevel {
  int32_t* q_indptr = nullptr;    // [requests + 1]
  int32_t* kv_lens = nullptr;     // [requests], 0 for requests that begin no group
  int32_t* first_keys = nullptr;  // [requests] first key; earlier keys belong to earlier levels
};

// The conditions for groups and levels.
struct PrefixRule {
  int32_t max_q_len = 0;  // new tokens of a request in a group
  int32_t min_saved = 0;  // keys that a level saves
};

// Returns the keys that a level must save in addition for each group after the first: every group
// has row tiles of its own, which may be nearly empty. Chosen on H200, 2026-11-22.
inline int32_t extra_saved(int32_t min_saved) { return min_saved / 11; }

// Returns true if layers use BatchHints::shared_prefix.
bool shares_prefixes(const AttentionSpec& spec);

// Returns the maximum number of new tokens with which a request joins a group, for layers that
// share prefixes.
inline int32_t max_prefix_q_len(const AttentionSpec& spec) {
  return kMaxPrefixRows / (spec.q_heads / spec.kv_heads);
}

// Returns the maximum number of new tokens of a pass that has groups: as many as max_requests
// requests in groups can have. So the memory for partial results depends on max_requests and not on
// max_tokens. A pass with more tokens has so many rows that reading prefixes again costs little.
int32_t max_prefix_tokens(const AttentionSpec& spec, const BatchLimits& limits);

// Returns a line for explain() about the use of shared prefixes; empty: the layers do not use them.
std::string describe_prefix_levels(const AttentionSpec& spec, const BatchLimits& limits);

// Returns BatchLimits::min_prefix_savings in keys.
int32_t min_saved_keys(const KvCacheSpec& cache, const BatchLimits& limits);

// Returns the maximum number of keys that a level of the batch can save, by the batch's bounds.
int64_t max_saved_keys(const BatchView& batch, const BatchLimits& limits);

// Fills the levels from the root of the tree of prefixes downwards, until a level saves too little,
// and writes to `first_keys` the first key of each request that belongs to no group. Returns the
// number of levels with groups; it does not write the others. Reads the batch's arrays.
int32_t find_prefix_levels(const BatchView& batch, const PrefixRule& rule,
                           std::span<const PrefixLevel> levels, int32_t* first_keys);

}  // namespace fovea
