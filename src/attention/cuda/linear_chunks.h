// SPDX-License-Identifier: Apache-2.0
// Prompts of linear layers in chunks, on GPUs that have kernels for it. Chunks take q, k and v in
// bf16, as the convolution writes them.
#pragma once

#include "fovea/attention_spec.h"
#include "fovea/device.h"
#include "kernels/cuda/portable/recurrence/launch.h"
#include "kernels/cuda/sm90/chunk_common/launch.h"

namespace fovea {

// Returns how the layers of a spec update their states.
kernels::cuda::RecurrenceKind recurrence_of(const AttentionSpec& spec);

// Requests of fewer tokens are faster token by token.
inline constexpr int32_t kMinChunkedTokens = 64;

// Returns whether prompts are computed in chunks: cuts of a prompt change their bits, so not in
// batch-invariant mode.
bool computes_chunks(const AttentionSpec& spec, const DeviceInfo& device);
kernels::cuda::ChunkPrefillSetup chunk_setup(const AttentionSpec& spec, const DeviceInfo& device);
// Returns the tensors of requests in chunks: `params` are those of the recurrence of the other
// requests, and `convolved` has rows of 2 * params.mixed_stride elements.
kernels::cuda::ChunkPrefillTensors chunk_tensors(const kernels::cuda::RecurrenceParams& params,
                                                 const uint16_t* convolved);

}  // namespace fovea
