// SPDX-License-Identifier: Apache-2.0
// The tokens that a pass of a linear layer computes for a request.
#pragma once

#include "kernels/cuda/common/linear_params.h"
#include "kernels/cuda/common/ptx.cuh"

namespace fovea::kernels::cuda {

// Replayed drafts before span.begin, then the request's tokens of the batch.
struct RequestTokens {
  StateSpan span;
  DraftSpan drafts = {};

  __device__ int32_t begin() const { return span.begin - drafts.replayed; }
  // Returns the first token that the state does not take in.
  __device__ int32_t first_draft() const { return span.end - drafts.drafts; }
  __device__ bool is_replayed(int32_t token) const {
    return drafts.replayed > 0 && token < span.begin;
  }
  // Returns the row of the slot that keeps a token, which is a replayed one or a draft.
  __device__ float* kept_row(const KeptInputs& kept, int32_t token) const {
    const int32_t index =
        is_replayed(token) ? token - begin() : drafts.replayed + token - first_draft();
    return kept.rows + span.slot * kept.slot_stride + int64_t{drafts.row(index)} * kept.size;
  }
};

}  // namespace fovea::kernels::cuda
