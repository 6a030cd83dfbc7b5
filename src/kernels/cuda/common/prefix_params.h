// SPDX-License-Identifier: Apache-2.0
// Parameter blocks of cascade attention: prefixes that neighbouring requests share are attended to
// once for all of them.
#pragma once

#include "kernels/cuda/common/attention_params.h"

namespace fovea::kernels::cuda {

constexpr int32_t kPrefixLevels = 4;
constexpr int32_t kPrefixScratch = 6;    // integers for each request,
constexpr int32_t kHeldRequests = 1024;  // in shared memory up to so many
// Of a launch, without those for page tables: each finds the groups for itself.
constexpr int32_t kMostPlanBlocks = 12;

constexpr int32_t kJoinWarps = 8;  // of a block of the join, a row each

// The groups of one level as a batch of their own: request i stands for the group that begins with
// it. As fovea::PrefixLevel.
struct PrefixGroups {
  int32_t* q_indptr;    // [requests + 1]
  int32_t* kv_lens;     // [requests], 0 where no group begins
  int32_t* first_keys;  // [requests]
  int32_t* begins;      // [requests] the first request of the group
};

// Where the parts of a (row tile, kv head) pair of groups lie, in the order of their keys: slot
// `first`, then `count - 1` slots from `first + 1` in steps of two. count 1: it is whole.
struct GroupParts {
  int32_t first;
  int32_t count;
};

// What a plan of a cascade finds before it plans: the groups of the first `levels` levels, of which
// it writes those that have arrays.
struct PrefixGroupsParams {
  const int32_t* q_indptr;       // [requests + 1]
  const int32_t* kv_lens;        // [requests]
  const int32_t* shared_prefix;  // [requests], as BatchView::shared_prefix
  PrefixGroups groups[kPrefixLevels];
  int32_t* first_keys;  // [requests] keys from here on belong to no group; or null
  int32_t* scratch;     // [kMostPlanBlocks, requests, kPrefixScratch] beyond kHeldRequests
  int32_t requests;
  int32_t most_q_len;    // of a request in a group
  int32_t tile_tokens;   // of a row tile of the kernel that attends to groups
  int32_t least_prefix;  // keys of a group
  int32_t least_saved;   // keys that a level saves from being read again
  int32_t more_saved;    // for each of its groups but one
  int32_t levels;        // 0: nothing is to be found
};

// States of a pass over groups, of the requests in them: a request is in one if the first_keys of
// the next pass are others. Of a kernel that leaves parts, `parts` says where those of pair (tile,
// kv head) are; of others it is null and all is in out and lse.
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
  const int32_t* first_keys;  // [requests] of the pass over what is in no group
  int32_t levels;
  PrefixState states[kPrefixLevels];
  void* out;  // of that pass, sinks applied; becomes the result
  int64_t out_token_stride, out_head_stride;
  const float* own_lse;  // [tokens, q_heads] of that pass
  float* lse;            // [tokens, q_heads] of the result, or null; may be own_lse
  const float* sinks;    // [q_heads] or null
  int32_t head_dim_v;
  // What plan() wrote is complete when the kernel starts: an attention launched before this one has
  // waited for it.
  int32_t list_settled;
};

}  // namespace fovea::kernels::cuda
