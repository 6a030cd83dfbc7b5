// SPDX-License-Identifier: Apache-2.0
// Multi-head latent attention on a GPU. Absorbed: W_UK goes into the queries, attention runs
// over the cached latents themselves, W_UV turns its result into values. Up-projected, for long
// extends: mla_up_projected.h. plan() builds the page table, chooses each request's form and orders
// the work on the device, from the batch's lengths.
#pragma once

#include <memory>
#include <optional>

#include "attention/cuda/mla_kernels.h"
#include "attention/cuda/mla_up_projected_buffers.h"
#include "fovea/attention_backend.h"
#include "fovea/select_backend.h"

namespace fovea {

// room: of the up-projected form, else mla_prefill_room().
size_t mla_workspace_bytes(const MlaKernels& kernels, const AttentionSpec& spec,
                           const KvCacheSpec& cache, const DeviceInfo& device,
                           const BatchLimits& limits,
                           const std::optional<MlaPrefillRoom>& room = {});

// Loads every kernel: what is not packed is compiled here. Errors as BackendEntry::create.
std::unique_ptr<AttentionBackend> make_mla_backend(const MlaKernels& kernels,
                                                   const BackendContext& context,
                                                   const std::optional<MlaPrefillRoom>& room = {});

}  // namespace fovea
