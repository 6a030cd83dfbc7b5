// SPDX-License-Identifier: Apache-2.0
// Parameters of portable/merge_states, read by host and device code alike.
#pragma once

#ifdef __CUDACC_RTC__
#include "kernels/cuda/common/types.cuh"
#else
#include <cstdint>
#endif

namespace fovea::kernels::cuda {

// Adds attention to other keys, `part`, to the result so far. Elements are of one 16-bit type;
// strides count elements.
struct MergeStatesParams {
  void* out;         // [tokens, heads, v_dim]
  const void* part;  // [tokens, heads, v_dim]
  int64_t out_token_stride, out_head_stride, part_token_stride, part_head_stride;
  float* lse;                // [tokens, heads]
  const float* part_lse;     // [tokens, heads]; -inf: nothing to add
  const int32_t* live_rows;  // [1] 0: the part was not computed; null: it was
  const int32_t* q_indptr;   // [requests + 1]: tokens from the last entry on are skipped; or null
  int32_t requests, tokens, heads, v_dim;
};

}  // namespace fovea::kernels::cuda
