// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/sm90/chunk_common/launch.h"

#include <algorithm>
#include <vector>

#include "kernels/cuda/family.h"
#include "kernels/cuda/gdn_prefill.h"

namespace fovea::kernels::cuda {
namespace {

constexpr int32_t kChunkBlocksPerSm = 3;  // blocks of sm90/gdn_chunks on an SM
// The parts of the workspace for one batch.
struct Workspace {
  GdnTerms* terms;
  GdnPlan plan;
  size_t bytes;

  // Only counts the bytes if `at` is null.
  Workspace(const GdnPrefillSetup& setup, const ChunkRoom& room, void* at) {
    ChunkArrays arrays{at};
    arrays.take(terms, int64_t{room.chunks} * setup.value_heads);
    arrays.take(plan, room);
    bytes = arrays.bytes;
  }
};

ChunkRoom room_of(const GdnPrefillSetup& setup, const GdnPrefillBatch& batch) {
  return {setup.min_tokens, batch.tokens, batch.requests};
}

}  // namespace

bool GdnPrefill::serves(const GdnPrefillSetup& setup) {
  return setup.sm == 90 && setup.key_dim == kGdnDim && setup.value_dim == kGdnDim &&
         setup.key_heads > 0 && setup.value_heads % setup.key_heads == 0 &&
         setup.value_heads / setup.key_heads <= kGdnMaxShare;
}

std::vector<gpu::KernelVariant> GdnPrefill::variants(const GdnPrefillSetup& setup) {
  return {make_variant(family("sm90/gdn_plan"), {"256"}, setup.sm),
          make_variant(family("sm90/gdn_chunks"), {"bf16"}, setup.sm),
          make_variant(family("sm90/gdn_states"), {"bf16"}, setup.sm)};
}

size_t GdnPrefill::workspace_bytes(const GdnPrefillSetup& setup, int32_t max_tokens,
                                   int32_t max_requests) {
  return Workspace(setup, {setup.min_tokens, max_tokens, max_requests}, nullptr).bytes;
}

GdnPrefill::GdnPrefill(const GdnPrefillSetup& setup, gpu::KernelStore& store) : setup_(setup) {
  const std::vector<gpu::KernelVariant> needed = variants(setup);
  plan_ = Kernel(needed[0], store);
  chunks_ = Kernel(needed[1], store);
  states_ = Kernel(needed[2], store);
}

void GdnPrefill::plan(const GdnPrefillBatch& batch, void* workspace, gpu::Launcher launcher) const {
  const ChunkRoom room = room_of(setup_, batch);
  const GdnPlanParams params = {.plan = Workspace(setup_, room, workspace).plan,
                                .spans = batch.spans,
                                .requests = batch.requests,
                                .max_chunks = room.chunks,
                                .max_walks = room.walks};
  plan_.launch({1}, params, launcher, kOverlapped);
}

void GdnPrefill::run(const GdnPrefillBatch& batch, const GdnPrefillTensors& tensors,
                     void* workspace, gpu::Launcher launcher) const {
  const ChunkRoom room = room_of(setup_, batch);
  if (room.walks == 0) return;
  const Workspace parts(setup_, room, workspace);
  GdnPrefillParams params{};
  const int64_t keys = int64_t{setup_.key_heads} * kGdnDim;
  encode_rows(tensors.q, keys, tensors.q_token_stride, batch.tokens, maps_.q, params.q);
  encode_rows(tensors.k, keys, tensors.k_token_stride, batch.tokens, maps_.k, params.k);
  encode_rows(tensors.v, int64_t{setup_.value_heads} * kGdnDim, tensors.v_token_stride,
              batch.tokens, maps_.v, params.v);
  params.log_decay = tensors.log_decay;
  params.beta = tensors.beta;
  params.spans = batch.spans;
  params.plan = parts.plan;
  params.terms = parts.terms;
  params.state = tensors.state;
  params.state_type = tensors.state_type;
  params.state_slot_stride = tensors.state_slot_stride;
  params.out = tensors.out;
  params.out_token_stride = tensors.out_token_stride;
  params.key_heads = setup_.key_heads;
  params.value_heads = setup_.value_heads;
  params.scale = tensors.scale;
  params.l2_normalise = tensors.l2_normalise_qk;
  const auto blocks = [&](int64_t tasks, int32_t per_sm) {
    return static_cast<uint32_t>(std::min<int64_t>(tasks, per_sm * setup_.multiprocessors));
  };
  chunks_.launch({blocks(int64_t{room.chunks} * setup_.key_heads, kChunkBlocksPerSm)}, params,
                 launcher, kOverlapped);
  const int64_t parts_of_a_head = kGdnDim / states_.row_tile();
  states_.launch({blocks(room.walks * parts_of_a_head * setup_.value_heads, kStateBlocksPerSm)},
                 params, launcher, kOverlapped);
}

}  // namespace fovea::kernels::cuda
