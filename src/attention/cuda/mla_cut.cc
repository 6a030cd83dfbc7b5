// SPDX-License-Identifier: Apache-2.0
#include "attention/cuda/mla_cut.h"

#include <algorithm>

#include "attention/cuda/mla_layer.h"
#include "attention/mla_forms.h"

namespace fovea {
namespace {

int64_t bytes_with(const MlaSetup& setup, const BatchLimits& limits, const MlaCut& cut) {
  WorkspaceCarver counter(nullptr);
  carve_mla(counter, setup, limits, cut);
  return static_cast<int64_t>(counter.bytes());
}

}  // namespace

std::vector<kernels::cuda::MlaDecodeSetup> MlaSetup::decode(int32_t heads) const {
  AttentionSpec some = spec;
  some.q_heads = heads;
  return mla_decode_setups(*kernels, some, cache, device);
}

MlaCut cut_mla(const MlaSetup& setup, const BatchLimits& limits) {
  const AttentionSpec& spec = setup.spec;
  const DType stored = setup.cache.dtype;
  const bool up = serves_up_projected(spec, limits);
  const auto room_of = [&](int64_t bytes) {
    if (setup.room) return *setup.room;
    if (!up) return UpProjectedRoom{};
    return up_projected_room(*setup.kernels, spec, stored, setup.device, limits, bytes);
  };
  const UpProjectedRoom least = room_of(0);
  const int64_t budget = limits.workspace_budget;
  MlaCut cut{spec.q_heads, least};
  // LSEs of some heads do not lie side by side.
  if (spec.mla.nope_dim > 0 && !spec.needs_lse) {
    const int64_t allowed = std::max(budget, bytes_with(setup, limits, {1, least}) + budget / 4);
    while (bytes_with(setup, limits, cut) > allowed && cut.heads > 1) {
      cut.heads = fewer_heads(spec.q_heads, cut.heads);
    }
  }
  if (!up) return cut;
  // The least room is a part of the larger one. Buffers begin at multiples of 64 bytes.
  constexpr int64_t kSlack = 8 * 64;
  const int64_t left = budget - bytes_with(setup, limits, cut) - kSlack +
                       up_projected_bytes(*setup.kernels, spec, stored, setup.device, least);
  cut.room = room_of(std::clamp<int64_t>(left, 0, kUpProjectedRoomBytes));
  return cut;
}

MlaDeviceBuffers carve_mla(WorkspaceCarver& workspace, const MlaSetup& setup,
                           const BatchLimits& limits, const MlaCut& cut) {
  MlaDeviceBuffers buffers;
  const AttentionSpec& spec = setup.spec;
  buffers.pages = CudaCache::carve(workspace, spec, setup.cache.page_size, limits);
  size_t work = 0;
  for (const int32_t heads : {spec.q_heads, cut.heads}) {
    for (const kernels::cuda::MlaDecodeSetup& decode : setup.decode(heads)) {
      work = std::max(work, kernels::cuda::MlaDecode::workspace_bytes(decode, limits));
    }
  }
  buffers.work = workspace.take_bytes(work).data();
  if (spec.mla.nope_dim == 0) return buffers;
  const bool up = serves_up_projected(spec, limits);
  const auto heads_of = [&](int32_t width) {
    return workspace.take<std::byte>(int64_t{limits.max_tokens} * cut.heads * width *
                                     static_cast<int64_t>(dtype_bytes(spec.q_dtype)));
  };
  const int32_t rank = spec.mla.kv_lora_rank;
  buffers.scratch.queries =
      heads_of(up ? std::max(rank, spec.mla.nope_dim + spec.mla.rope_dim) : rank);
  buffers.scratch.results = heads_of(up ? std::max(rank, spec.mla.v_dim) : rank);
  if (up) {
    buffers.prefill = carve_up_projected(workspace, *setup.kernels, spec, setup.cache.dtype,
                                         setup.device, limits, cut.room);
  }
  return buffers;
}

}  // namespace fovea
