// SPDX-License-Identifier: Apache-2.0
// Requests with up to eight query rows a kv head where keys are summed in segments: the bits that
// sm90/prefill gives them, sooner.
#pragma once

#include <array>
#include <optional>
#include <vector>

#include "kernels/cuda/sm90/common/prefill_kernel.h"

namespace fovea::kernels::cuda::few_rows {

inline constexpr int32_t kMaxRows = 8;  // packed rows of a request: columns of a warp's product

class FewRows {
 public:
  // Returns the kernels that the constructor takes from the store. The layer sums segments, and its
  // scores are plain.
  static std::vector<gpu::KernelVariant> variants(const AttentionSetup& setup);

  FewRows(const AttentionSetup& setup, gpu::KernelStore& store);

  // Returns how to launch a batch of requests with up to kMaxRows rows and max_kv_len keys.
  prefill::Launch choose(int32_t requests, int32_t head_blocks, int32_t max_kv_len) const;

 private:
  // Blocks of a cluster that share segments.
  struct Sharing {
    std::optional<prefill::PrefillKernel> kernel;
    int32_t cluster;       // blocks
    int32_t max_segments;  // of the batch's only request; 0: any batch
    int32_t clusters = 0;  // clusters that run at the same time
  };

  bool serves(const Sharing& sharing, int32_t requests, int32_t tiles, int32_t max_kv_len) const;

  int32_t multiprocessors_;
  prefill::PrefillKernel alone_;  // each block takes whole segments
  std::array<Sharing, 3> sharing_;
};

}  // namespace fovea::kernels::cuda::few_rows
