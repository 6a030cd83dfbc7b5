// SPDX-License-Identifier: Apache-2.0
// The workspace of MLA on a GPU, and how passes keep to a budget of it: they compute some heads
// after the others, and up-project fewer latents at a time.
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

// The layer and the device: they decide kernels and bytes.
struct MlaSetup {
  const MlaKernels* kernels = nullptr;
  AttentionSpec spec;
  KvCacheSpec cache;
  DeviceInfo device;
  std::optional<UpProjectedRoom> room;  // for the up-projected form; absent: the default

  // Returns the absorbed kernels for `heads` of the heads, as mla_decode_setups().
  std::vector<kernels::cuda::MlaDecodeSetup> decode(int32_t heads) const;
};

// How passes of max_tokens tokens keep to BatchLimits::workspace_budget.
struct MlaCut {
  int32_t heads = 0;     // heads computed at a time, a divisor of q_heads
  UpProjectedRoom room;  // for the up-projected form, if there is one
};
// Takes as many heads as fit the budget, or a quarter of it if everything else leaves less, and
// then as much room as remains.
MlaCut cut_mla(const MlaSetup& setup, const BatchLimits& limits);

struct MlaDeviceBuffers {
  CudaPages pages;
  std::byte* work = nullptr;  // shared by the absorbed kernels: one plan is valid at a time
  // With weights: [max_tokens, cut.heads, kv_lora_rank] queries and results in the latent space.
  // The up-projected form uses the same bytes first.
  MlaScratch scratch;
  UpProjectedBuffers prefill;  // if requests can be up-projected
};
MlaDeviceBuffers carve_mla(WorkspaceCarver& workspace, const MlaSetup& setup,
                           const BatchLimits& limits, const MlaCut& cut);

}  // namespace fovea
