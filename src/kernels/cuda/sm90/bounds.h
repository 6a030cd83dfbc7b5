// SPDX-License-Identifier: Apache-2.0
// From what a backend asks of a plan to the bounds that choose its kernels.
#pragma once

#include <algorithm>

#include "kernels/cuda/attention_kernel.h"
#include "kernels/cuda/sm90/choose.h"

namespace fovea::kernels::cuda::hopper {

// Fills in the limits where the batch has no bounds of its own.
inline BatchBounds bounds_of(const PlanRequest& request, const BatchLimits& limits) {
  const BatchParams& batch = request.batch;
  BatchBounds bounds;
  bounds.requests = request.keys.requests > 0 ? request.keys.requests : batch.requests;
  bounds.all_requests = batch.requests;
  bounds.tokens = request.tokens;
  bounds.q_len = batch.max_q_len > 0 ? batch.max_q_len : limits.max_q_len;
  bounds.kv_len = request.keys.max_kv_len > 0 ? request.keys.max_kv_len : limits.max_kv_len;
  bounds.q_heads = batch.q_heads;
  bounds.kv_heads = batch.kv_heads;
  bounds.has_positions = batch.mask.positions != nullptr;
  bounds.prefix_written = request.keys.prefix_written;
  bounds.concurrent = request.role == PassRole::concurrent;
  return bounds;
}

}  // namespace fovea::kernels::cuda::hopper
