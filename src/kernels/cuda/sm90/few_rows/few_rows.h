// SPDX-License-Identifier: Apache-2.0
// Requests with up to eight query rows a kv head where keys are summed in segments: the bits that
// sm90/prefill gives them, sooner.
#pragma once

#include <vector>

#include "kernels/cuda/sm90/choose.h"
#include "kernels/cuda/sm90/common/prefill_kernel.h"

namespace fovea::kernels::cuda::few_rows {

class FewRows {
 public:
  // Returns the kernels that the constructor takes from the store. The layer sums segments, and its
  // scores are plain.
  static std::vector<gpu::KernelVariant> variants(const AttentionSetup& setup);

  FewRows(const AttentionSetup& setup, gpu::KernelStore& store);

  // Returns how to launch a batch of requests with up to hopper::kMaxFewRows packed rows.
  // head_blocks: row tiles of a request.
  prefill::Launch choose(const hopper::BatchBounds& bounds, int32_t head_blocks) const;
  int32_t key_tile() const { return alone_.kernel().key_tile(); }

 private:
  int32_t multiprocessors_;
  prefill::PrefillKernel alone_;                 // each block takes whole segments
  std::vector<hopper::SharingForm> forms_;       // with blocks that share segments
  std::vector<prefill::PrefillKernel> sharing_;  // as forms_
};

}  // namespace fovea::kernels::cuda::few_rows
