// SPDX-License-Identifier: Apache-2.0
// The workspace of MLA on a GPU, and how passes are cut to keep to a budget of it: some heads are
// computed after the others, and fewer latents are up-projected at a time.
#pragma once

#include <optional>
#include <vector>

#include "attention/cuda/cache.h"
#include "attention/cuda/mla_kernels.h"
#include "attention/cuda/mla_up_projected.h"
#include "core/workspace_carver.h"
#include "fovea/select_backend.h"
#include "kernels/cuda/mla_decode.h"

namespace fovea {

// What decides kernels and bytes.
struct MlaSetup {
  const MlaKernels* kernels = nullptr;
  AttentionSpec spec;
  KvCacheSpec cache;
  DeviceInfo device;
  std::optional<MlaPrefillRoom> room;  // of the up-projected form, else the usual one

  // The absorbed kernels for so many of the heads, as mla_decode_setups().
  std::vector<kernels::cuda::MlaDecodeSetup> decode(int32_t heads) const;
};

// How passes of max_tokens tokens keep to BatchLimits::workspace_budget.
struct MlaCut {
  int32_t heads = 0;    // that are computed at a time, a divisor of q_heads
  MlaPrefillRoom room;  // of the up-projected form, where there is one
};
// As many heads as the budget has room for, or a quarter of it beside what else is needed; then as
// much room as that leaves.
MlaCut cut_mla(const MlaSetup& setup, const BatchLimits& limits);

struct MlaDeviceBuffers {
  CudaPages pages;
  std::byte* work = nullptr;  // of the absorbed kernels; one plan is valid at a time
  // With weights: [max_tokens, cut.heads, kv_lora_rank] of queries and of results in the latent
  // space, before that the up-projected form's.
  MlaScratch scratch;
  MlaPrefillBuffers prefill;  // where requests can be up-projected
};
MlaDeviceBuffers carve_mla(WorkspaceCarver& workspace, const MlaSetup& setup,
                           const BatchLimits& limits, const MlaCut& cut);

}  // namespace fovea
