// SPDX-License-Identifier: Apache-2.0
// Multi-head latent attention on a GPU. In the absorbed form W_UK goes into the queries, attention
// runs over the cached latents themselves, and W_UV turns its result into values. Long extends take
// the up-projected form (mla_up_projected.h). plan() builds the page table, chooses each request's
// form and orders the work on the device, by the batch's lengths.
#pragma once

#include <memory>
#include <optional>

#include "attention/cuda/mla_kernels.h"
#include "attention/cuda/mla_up_projected_buffers.h"
#include "fovea/attention_backend.h"
#include "fovea/select_backend.h"

namespace fovea {

// room: for the up-projected form; absent: up_projected_room().
size_t mla_workspace_bytes(const MlaKernels& kernels, const AttentionSpec& spec,
                           const KvCacheSpec& cache, const DeviceInfo& device,
                           const BatchLimits& limits,
                           const std::optional<UpProjectedRoom>& room = {});

// Loads every kernel, and compiles those that no pack has. Errors as BackendEntry::create.
std::unique_ptr<AttentionBackend> make_mla_backend(const MlaKernels& kernels,
                                                   const BackendContext& context,
                                                   const std::optional<UpProjectedRoom>& room = {});

}  // namespace fovea
