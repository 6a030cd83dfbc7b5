// SPDX-License-Identifier: Apache-2.0
// Parameter blocks of cascade attention: prefixes that neighbouring requests share are attended to
// once for all of them.
#pragma once

#include "kernels/cuda/common/attention_params.h"

namespace fovea::kernels::cuda {

constexpr int32_t kPrefixLevels = 4;
constexpr int32_t kPrefixScratch = 5;    // integers for each request,
constexpr int32_t kHeldRequests = 1024;  // in shared memory up to so many
constexpr int32_t kMostPlanBlocks = 4;   // of a plan, each of which finds the groups for itself

// The groups of one level as a batch of their own: request i stands for the group that begins with
// it. As fovea::PrefixLevel.
struct PrefixGroups {
  int32_t* q_indptr;    // [requests + 1]
  int32_t* kv_lens;     // [requests], 0 where no group begins
  int32_t* first_keys;  // [requests]
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
  int32_t least_prefix;  // keys of a group
  int32_t least_saved;   // keys that a level saves from being read again
  int32_t levels;        // 0: nothing is to be found
};

// States of the passes over groups, of the requests in them.
struct PrefixState {
  const int32_t*
      first_keys;    // [requests] of the groups; a request is in one if it is not the next's
  const float* out;  // [tokens, q_heads, head_dim_v]
  const float* lse;  // [tokens, q_heads]
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
};

}  // namespace fovea::kernels::cuda
