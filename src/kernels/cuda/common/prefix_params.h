// SPDX-License-Identifier: Apache-2.0
// Parameter blocks of cascade attention, which attends to prefixes that neighbouring requests share
// once for all of them.
#pragma once

#include "kernels/cuda/common/attention_params.h"

namespace fovea::kernels::cuda {

constexpr int32_t kPrefixLevels = 4;
constexpr int32_t kPrefixScratch = 6;    // integers for each request
constexpr int32_t kHeldRequests = 1024;  // up to so many requests keep them in shared memory
// Planning blocks of a launch, without those for page tables. Each finds the groups for itself.
constexpr int32_t kMaxPlanBlocks = 12;

constexpr int32_t kJoinWarps = 8;  // warps of a block of the join; each takes a row

// The groups of one level as a batch: request i stands for the group that begins with it. As
// fovea::PrefixLevel.
struct PrefixGroups {
  int32_t* q_indptr;    // [requests + 1]
  int32_t* kv_lens;     // [requests], 0 where no group begins
  int32_t* first_keys;  // [requests]
  int32_t* begins;      // [requests] the first request of the group
};

// The slots of the parts of a (row tile, kv head) pair of groups, in the order of their keys: slot
// `first`, then `count - 1` slots from `first + 1` in steps of two. count 1: the pair is whole.
struct GroupParts {
  int32_t first;
  int32_t count;
};

// The search for groups before a plan of a cascade: it finds the groups of the first `levels`
// levels and writes those that have arrays.
struct PrefixGroupsParams {
  const int32_t* q_indptr;       // [requests + 1]
  const int32_t* kv_lens;        // [requests]
  const int32_t* shared_prefix;  // [requests], as BatchHints::shared_prefix
  PrefixGroups groups[kPrefixLevels];
  int32_t* first_keys;  // [requests] keys from here on belong to no group; or null
  int32_t* scratch;     // [kMaxPlanBlocks, requests, kPrefixScratch] beyond kHeldRequests
  int32_t requests;
  int32_t max_q_len;    // new tokens of a request in a group
  int32_t tile_tokens;  // tokens of a row tile of the kernel that attends to groups
  int32_t min_prefix;   // keys of a group
  int32_t min_saved;    // keys that a level must save from being read again,
  int32_t more_saved;   // and so many more for each of its groups but one
  int32_t levels;       // 0: there is nothing to find
};

// The states that a pass over groups leaves for the requests in them. A request is in a group if
// the next pass has other first_keys for it. A kernel that leaves parts tells in `parts` which
// slots the parts of a (tile, kv head) pair have; for other kernels `parts` is null, and the states
// are in out and lse.
struct PrefixState {
  PrefixGroups groups;
  const float* out;            // [tokens, q_heads, head_dim_v]
  const float* lse;            // [tokens, q_heads]
  const GroupParts* parts;     // [tiles, kv_heads]
  const int32_t* tile_indptr;  // [requests + 1] tiles before each group
  const float* part_out;       // [slots, row_tile, head_dim_v]
  const float* part_lse;       // [slots, row_tile]
  int32_t row_tile;
};

struct PrefixJoinParams {
  BatchParams batch;
  const int32_t* first_keys;  // [requests] of the pass over the keys that are in no group
  int32_t levels;
  PrefixState states[kPrefixLevels];
  void* out;  // result of that pass with sinks applied; becomes the joined result
  int64_t out_token_stride, out_head_stride;
  const float* own_lse;  // [tokens, q_heads] LSE of that pass
  float* lse;            // [tokens, q_heads] LSE of the joined result, or null; may be own_lse
  const float* sinks;    // [q_heads] or null
  int32_t head_dim_v;
  // The output of plan() is complete when the kernel starts, because an attention launched before
  // this one has waited for it.
  int32_t plan_complete;
};

}  // namespace fovea::kernels::cuda
