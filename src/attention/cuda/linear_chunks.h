// SPDX-License-Identifier: Apache-2.0
// Prompts of linear layers in chunks, on GPUs that have kernels for it. Chunks take q, k and v in
// bf16, as the convolution writes them.
#pragma once

#include <optional>
#include <vector>

#include "fovea/attention_spec.h"
#include "fovea/device.h"
#include "kernels/cuda/gdn_prefill.h"
#include "kernels/cuda/portable/recurrence/launch.h"
#include "kernels/cuda/ssd_prefill.h"

namespace fovea {

// Returns how the layers of a spec update their states.
kernels::cuda::RecurrenceKind recurrence_of(const AttentionSpec& spec);

struct ChunkedBatch {
  const kernels::cuda::StateSpan* spans = nullptr;  // [requests]
  int32_t requests = 0, tokens = 0;
};

class LinearChunks {
 public:
  // Requests of fewer tokens are faster token by token.
  static constexpr int32_t kMinTokens = 64;

  // Returns whether prompts are computed in chunks: cuts of a prompt change their bits, so not in
  // batch-invariant mode.
  static bool serves(const AttentionSpec& spec, const DeviceInfo& device);
  // The following need a spec that serves() accepts.
  static std::vector<gpu::KernelVariant> variants(const AttentionSpec& spec,
                                                  const DeviceInfo& device);
  static size_t workspace_bytes(const AttentionSpec& spec, const DeviceInfo& device,
                                int32_t max_tokens, int32_t max_requests);
  LinearChunks(const AttentionSpec& spec, const DeviceInfo& device, gpu::KernelStore& store);

  // As GdnPrefill's.
  void plan(const ChunkedBatch& batch, void* workspace, gpu::Launcher launcher) const;
  // Computes the requests that are in_chunks, with the parameters of the recurrence of the others.
  // `convolved` has rows of 2 * params.mixed_stride elements.
  void run(const ChunkedBatch& batch, const kernels::cuda::RecurrenceParams& params,
           const uint16_t* convolved, void* workspace, gpu::Launcher launcher) const;

 private:
  int64_t log_decay_stride_;
  std::optional<kernels::cuda::GdnPrefill> gdn_;
  std::optional<kernels::cuda::SsdPrefill> ssd_;
};

}  // namespace fovea
