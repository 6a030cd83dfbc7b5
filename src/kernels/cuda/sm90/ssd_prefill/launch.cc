// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/sm90/chunk_common/launch.h"

#include <algorithm>
#include <vector>

#include "kernels/cuda/family.h"
#include "kernels/cuda/ssd_prefill.h"

namespace fovea::kernels::cuda {
namespace {

// The plan in a workspace that begins at `at`, or the bytes of one.
struct Workspace {
  GdnPlan plan;
  size_t bytes;

  Workspace(const ChunkRoom& room, void* at) {
    ChunkArrays arrays{at};
    arrays.take(plan, room);
    bytes = arrays.bytes;
  }
};

ChunkRoom room_of(const SsdPrefillSetup& setup, const SsdPrefillBatch& batch) {
  return {setup.min_tokens, batch.tokens, batch.requests};
}

}  // namespace

bool SsdPrefill::serves(const SsdPrefillSetup& setup) {
  return setup.sm == 90 && setup.key_dim == kGdnDim && setup.value_dim % kSsdValues == 0 &&
         setup.key_heads > 0 && setup.value_heads % setup.key_heads == 0;
}

std::vector<gpu::KernelVariant> SsdPrefill::variants(const SsdPrefillSetup& setup) {
  return {make_variant(family("sm90/gdn_plan"), {"256"}, setup.sm),
          make_variant(family("sm90/ssd_prefill"), {"bf16"}, setup.sm)};
}

size_t SsdPrefill::workspace_bytes(const SsdPrefillSetup& setup, int32_t max_tokens,
                                   int32_t max_requests) {
  return Workspace({setup.min_tokens, max_tokens, max_requests}, nullptr).bytes;
}

SsdPrefill::SsdPrefill(const SsdPrefillSetup& setup, gpu::KernelStore& store) : setup_(setup) {
  const std::vector<gpu::KernelVariant> needed = variants(setup);
  plan_ = Kernel(needed[0], store);
  prefill_ = Kernel(needed[1], store);
}

void SsdPrefill::plan(const SsdPrefillBatch& batch, void* workspace, gpu::Launcher launcher) const {
  const ChunkRoom room = room_of(setup_, batch);
  const GdnPlanParams params = {.plan = Workspace(room, workspace).plan,
                                .spans = batch.spans,
                                .requests = batch.requests,
                                .max_chunks = room.chunks,
                                .max_walks = room.walks};
  plan_.launch({1}, params, launcher, kOverlapped);
}

void SsdPrefill::run(const SsdPrefillBatch& batch, const SsdPrefillTensors& tensors,
                     void* workspace, gpu::Launcher launcher) const {
  const ChunkRoom room = room_of(setup_, batch);
  if (room.walks == 0) return;
  SsdPrefillParams params{};
  const int64_t keys = int64_t{setup_.key_heads} * kGdnDim;
  const int64_t values = int64_t{setup_.value_heads} * setup_.value_dim;
  encode_rows(tensors.q, keys, tensors.q_token_stride, batch.tokens, maps_.q, params.q);
  encode_rows(tensors.k, keys, tensors.k_token_stride, batch.tokens, maps_.k, params.k);
  encode_rows(tensors.v, values, tensors.v_token_stride, batch.tokens, maps_.v, params.v);
  params.log_decay = tensors.log_decay;
  params.log_decay_stride = tensors.log_decay_stride;
  params.strength = tensors.strength;
  params.skip = tensors.skip;
  params.spans = batch.spans;
  params.plan = Workspace(room, workspace).plan;
  params.state = tensors.state;
  params.state_slot_stride = tensors.state_slot_stride;
  params.state_type = tensors.state_type;
  params.out = tensors.out;
  params.out_token_stride = tensors.out_token_stride;
  params.key_heads = setup_.key_heads;
  params.value_heads = setup_.value_heads;
  params.value_dim = setup_.value_dim;
  params.scale = tensors.scale;
  const int64_t tasks = int64_t{room.walks} * (values / prefill_.row_tile());
  const int64_t blocks = std::min<int64_t>(tasks, kStateBlocksPerSm * setup_.multiprocessors);
  prefill_.launch({static_cast<uint32_t>(blocks)}, params, launcher, kOverlapped);
}

}  // namespace fovea::kernels::cuda
